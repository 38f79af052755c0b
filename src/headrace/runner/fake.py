"""A runner without a model: the next token is a hash of the slot's seed and position. For tests and for measuring the
host's cost; no torch."""

from __future__ import annotations

import numpy as np

from headrace.steps import FULL, STOPPED, UNFINISHED, IntArray, Masks, ReadoutChunk, ReadoutResult, StepPlan, StepResult


class FakeRunner:
    """Keeps slots as a device would; results are ready at once."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int = 32_000) -> None:
        self.vocab_size = vocab_size
        self.num_steps = 0
        self._len = np.zeros(max_num_seqs, np.int64)
        self._end = np.zeros(max_num_seqs, np.int64)
        self._seed = np.zeros(max_num_seqs, np.uint64)
        self._stops: dict[int, frozenset[int]] = {}

    def submit(self, plan: StepPlan, masks: Masks | None = None) -> StepResult:
        self.num_steps += 1
        for entry in plan.slot_entries:
            self._len[entry.slot] = len(entry.token_ids)
            self._end[entry.slot] = entry.end_len
            self._seed[entry.slot] = entry.seed & 0xFFFFFFFFFFFFFFFF
            self._stops.pop(entry.slot, None)
            if entry.stop_token_ids:
                self._stops[entry.slot] = frozenset(entry.stop_token_ids)
        slots = plan.slots[plan.samples]
        tokens = self._next_tokens(slots)
        if masks is not None:
            self._apply_masks(masks, slots, tokens)
        self._len[slots] += 1
        finished = np.where(self._len[slots] >= self._end[slots], FULL, UNFINISHED).astype(np.uint8)
        for position, slot in enumerate(slots.tolist()) if self._stops else ():
            if tokens[position] in self._stops.get(slot, ()):
                finished[position] = STOPPED
        return StepResult(
            plan.step, slots, tokens, finished, readout_results=tuple(map(_read_out, plan.readout_chunks))
        )

    def _apply_masks(self, masks: Masks, slots: IntArray, tokens: IntArray) -> None:
        """Replace forbidden tokens by allowed ones."""
        index_of = {slot: index for index, slot in enumerate(slots.tolist())}
        for slot, row in zip(masks.slots.tolist(), masks.bits(), strict=True):
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            index = index_of[slot]
            tokens[index] = allowed[tokens[index] % len(allowed)] if len(allowed) else 0

    def collect(self, ticket: StepResult) -> StepResult:
        return ticket

    def close(self) -> None:
        pass

    def _next_tokens(self, slots: IntArray) -> IntArray:
        mixed = self._seed[slots] + self._len[slots].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(31)
        tokens: IntArray = (mixed % np.uint64(self.vocab_size)).astype(np.int64)
        return tokens


def _read_out(chunk: ReadoutChunk) -> ReadoutResult:
    """Each hidden state is [1]; the log-probability of a token is its negative id."""
    values = np.array([chunk.num_tokens / chunk.num_pooled]) if chunk.targets is None else -chunk.targets
    return ReadoutResult(chunk.slot, chunk.is_last, values.astype(np.float32))
