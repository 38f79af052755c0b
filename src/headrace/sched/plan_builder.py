"""Builds the plan of one step."""

from __future__ import annotations

import numpy as np

from headrace.kv import BlockCopy
from headrace.steps import BlockTransfers, Drafts, IntArray, ReadoutChunk, SlotEntry, StepPlan, TableWrites
from headrace.types import Request

_NO_SLOTS: IntArray = np.empty(0, np.int64)


class PlanBuilder:
    """Collects what one step does, within its token budget. Made and finished inside `Scheduler.plan`."""

    def __init__(self, step: int, budget: int, max_seqs: int | None = None) -> None:
        self.step = step
        self.budget = budget  # tokens that still fit; none once it has `max_seqs` sequences
        self.max_seqs = max_seqs  # None: any number
        self.background_budget = budget  # those of background sequences
        self.num_background = 0  # their tokens so far
        self.has_preempted = False
        # Blocks that prefill writes in this step. Copies run before it, so none may read these.
        self.written: set[int] = set()
        self.arriving: set[int] = set()  # blocks that are copied from the host tier beside this step
        self.arriving_slots: set[int] = set()  # those that enter with some of these
        self._decoding = _NO_SLOTS
        self._next_tokens: IntArray | None = None
        self._drafts: Drafts | None = None
        self._slots: list[int] = []
        self._num_tokens: list[int] = []
        self._samples: list[bool] = []
        self._readout_chunks: list[ReadoutChunk] = []
        self._slot_entries: list[SlotEntry] = []
        self._copies: list[BlockCopy] = []
        self._table_writes: list[tuple[IntArray, IntArray, IntArray]] = []

    @property
    def is_empty(self) -> bool:
        return not len(self._decoding) and not self._slots

    @property
    def num_prompts_completed(self) -> int:
        """Sequences that are prefilled to the end, so that the step also samples their first token."""
        return sum(self._samples)

    def budget_of(self, request: Request) -> int:
        return min(self.budget, self.background_budget) if request.is_background else self.budget

    def compute_decoding(
        self,
        slots: IntArray,
        next_tokens: IntArray | None = None,
        *,
        drafts: Drafts | None = None,
        num_background: int = 0,
    ) -> None:
        self._decoding = slots
        self._next_tokens = next_tokens
        self._drafts = drafts
        self._spend(self._num_decoded)
        self._count_background(num_background)

    @property
    def _num_decoded(self) -> int:
        return len(self._decoding) + (0 if self._drafts is None else int(self._drafts.lens.sum()))

    def compute(self, slot: int, num_tokens: int, *, samples: bool, is_background: bool = False) -> None:
        self._slots.append(slot)
        self._num_tokens.append(num_tokens)
        self._samples.append(samples)
        self._spend(num_tokens)
        self._count_background(num_tokens if is_background else 0)

    def _spend(self, num_tokens: int) -> None:
        is_full = self.max_seqs is not None and len(self._decoding) + len(self._slots) >= self.max_seqs
        self.budget = 0 if is_full else self.budget - num_tokens

    def _count_background(self, num_tokens: int) -> None:
        self.num_background += num_tokens
        self.background_budget = max(0, self.background_budget - num_tokens)

    def read_out(self, chunk: ReadoutChunk) -> None:
        self._readout_chunks.append(chunk)

    def enter(self, entry: SlotEntry, blocks: list[int], copy: BlockCopy | None) -> None:
        self._slot_entries.append(entry)
        num_blocks = len(blocks)
        slots = np.full(num_blocks, entry.slot, np.int64)
        self.write_tables(slots, np.arange(num_blocks, dtype=np.int64), np.array(blocks, np.int64))
        if copy is not None:
            self._copies.append(copy)

    def write_tables(self, slots: IntArray, indexes: IntArray, blocks: IntArray) -> None:
        self._table_writes.append((slots, indexes, blocks))

    def finish(self, last: StepPlan | None, transfers: BlockTransfers | None = None) -> StepPlan:
        changes = bool(self._slots or self._slot_entries)
        has_drafts = self._drafts is not None or (last is not None and last.drafts is not None)
        return StepPlan(
            step=self.step,
            slots=self._joined(self._decoding, self._slots),
            num_tokens=self._joined(self._decoded_tokens(), self._num_tokens),
            samples=np.concatenate([np.ones(len(self._decoding), np.bool_), np.array(self._samples, np.bool_)]),
            num_batched_tokens=self._num_decoded + sum(self._num_tokens),
            slot_entries=tuple(self._slot_entries),
            table_writes=TableWrites(*map(np.concatenate, zip(*self._table_writes, strict=True)))
            if self._table_writes
            else None,
            copies=tuple(self._copies),
            readout_chunks=tuple(self._readout_chunks),
            next_tokens=self._next_tokens,
            is_steady=not changes and last is not None and last.slots is self._decoding and not has_drafts,
            drafts=self._drafts,
            transfers=transfers,
        )

    def _decoded_tokens(self) -> IntArray:
        ones = np.ones(len(self._decoding), np.int64)
        return ones if self._drafts is None else ones + self._drafts.lens

    @staticmethod
    def _joined(decoding: IntArray, others: list[int]) -> IntArray:
        return np.concatenate([decoding, np.array(others, np.int64)]) if others else decoding
