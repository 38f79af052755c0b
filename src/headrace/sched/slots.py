"""The state of every running sequence in columns indexed by slot, so that a step is a few array operations however many
sequences run.

    tokens   p p p p p a a a ? ?         p prompt, a answer, ? sampled on the device but not yet seen here
             └─────known─────┘
             └───────total───────┘       includes the tokens that submitted steps will have sampled
             └────computed─────┘         keys and values in the KV cache once submitted steps are done

A slot is prefilling until a step samples its first token (also when it is recomputed after a preemption). From then on
it is decoding, and total - computed is 1.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from headrace.sched.sequence import Sequence
from headrace.steps import IntArray
from headrace.types import TokenIds

NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The last answer of `decoding_within`."""

    among: IntArray
    limits: tuple[int | None, int | None]
    slots: IntArray


class SlotTable:
    """Owns the slots on the host; `runner` holds their counterpart on the device."""

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.tokens = np.empty((num_slots, max_model_len), np.int32)  # pages are allocated when written
        self.known = np.zeros(num_slots, np.int64)
        self.total = np.zeros(num_slots, np.int64)
        self.computed = np.zeros(num_slots, np.int64)
        self.capacity = np.zeros(num_slots, np.int64)  # tokens that the slot's blocks can hold
        self.end = np.zeros(num_slots, np.int64)
        self.prompt_len = np.zeros(num_slots, np.int64)
        self.cached = np.zeros(num_slots, np.int64)  # tokens that came from the prefix cache when the slot was taken
        self.has_exact_length = np.zeros(num_slots, np.bool_)  # see Sequence
        # First step of the slot's owner: results of earlier steps belong to a former owner and are dropped.
        self.since = np.full(num_slots, NEVER, np.int64)
        self.is_watched = np.zeros(num_slots, np.bool_)  # its next token is delivered at once
        self.priority = np.zeros(num_slots, np.int64)
        self.is_background = np.zeros(num_slots, np.bool_)  # see Request
        self.adapter = np.zeros(num_slots, np.int64)  # see SlotEntry
        self.with_more_stops: set[int] = set()  # slots whose stop ids the device does not know all of
        self._is_decoding = np.zeros(num_slots, np.bool_)
        self._decoding: IntArray | None = None
        self._chosen: _Chosen | None = None
        self._free = list(range(num_slots))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_running(self) -> int:
        return len(self.sequences) - len(self._free)

    def running_adapters(self) -> list[int]:
        """The indexes of the adapters that running sequences use."""
        return [index - 1 for index in np.unique(self.adapter).tolist() if index]

    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence is not None]

    def decoding(self) -> IntArray:
        """The decoding slots, ascending; the same array object as long as nothing changed."""
        if self._decoding is None:
            self._decoding = np.flatnonzero(self._is_decoding)
        return self._decoding

    def decoding_within(self, *, priority: int | None, max_background: int | None) -> IntArray:
        """The decoding slots with this priority number or a lower one, and of those at most `max_background` background
        ones; the same array object as long as nothing changed."""
        slots = self.decoding()
        if priority is None and max_background is None:
            return slots
        last = self._chosen
        if last is None or last.among is not slots or last.limits != (priority, max_background):
            is_chosen = np.ones(len(slots), np.bool_) if priority is None else self.priority[slots] <= priority
            if max_background is not None:
                is_background = self.is_background[slots] & is_chosen
                is_chosen &= ~is_background | (np.cumsum(is_background) <= max_background)
            last = self._chosen = _Chosen(
                slots, (priority, max_background), slots if is_chosen.all() else slots[is_chosen]
            )
        return last.slots

    def has_interactive_decoding(self) -> bool:
        return not self.is_background[self.decoding()].all()

    def occupy(self, sequence: Sequence, *, step: int, num_computed: int, capacity: int) -> int:
        slot = heapq.heappop(self._free)
        num_tokens = len(sequence.token_ids)
        self.sequences[slot] = sequence
        self.tokens[slot, :num_tokens] = sequence.token_ids
        self.known[slot] = self.total[slot] = num_tokens
        self.computed[slot] = num_computed
        self.capacity[slot] = capacity
        self.end[slot] = sequence.end_len
        self.prompt_len[slot] = sequence.prompt_len
        self.cached[slot] = num_computed
        self.has_exact_length[slot] = sequence.has_exact_length
        self.since[slot] = step
        self.is_watched[slot] = sequence.delivers_next_token
        self.priority[slot] = sequence.request.priority
        self.is_background[slot] = sequence.request.is_background
        self.adapter[slot] = sequence.adapter_entry
        if sequence.has_more_stops:
            self.with_more_stops.add(slot)
        return slot

    def vacate(self, slot: int) -> None:
        self.sequences[slot] = None
        self.with_more_stops.discard(slot)
        self.since[slot] = NEVER
        self.adapter[slot] = 0
        self.total[slot] = self.capacity[slot] = 0
        if self._is_decoding[slot]:
            self._is_decoding[slot] = False
            self._decoding = None
        heapq.heappush(self._free, slot)

    def advance(self, slot: int, num_tokens: int) -> bool:
        """Count `num_tokens` more of a slot as computed; returns whether the step samples its next token."""
        self.computed[slot] += num_tokens
        if self.computed[slot] < self.total[slot]:
            return False
        self.total[slot] += 1
        if self.total[slot] < self.end[slot]:
            self._is_decoding[slot] = True
            self._decoding = None
        return True

    def advance_decoding(self, slots: IntArray) -> None:
        """Advance all decoding slots by one token; those that reach their end decode no more."""
        self.computed[slots] += 1
        self.total[slots] += 1
        ended = slots[self.total[slots] >= self.end[slots]]
        if len(ended):
            self._is_decoding[ended] = False
            self._decoding = None

    def record(self, slots: IntArray, tokens: IntArray) -> None:
        self.tokens[slots, self.known[slots]] = tokens
        self.known[slots] += 1

    def record_several(self, slots: IntArray, tokens: IntArray, num_tokens: IntArray) -> None:
        """Record `num_tokens` of each slot, slot after slot. Their step was counted as one token each."""
        offsets = np.arange(len(tokens)) - np.repeat(np.cumsum(num_tokens) - num_tokens, num_tokens)
        self.tokens[np.repeat(slots, num_tokens), np.repeat(self.known[slots], num_tokens) + offsets] = tokens
        self.known[slots] += num_tokens
        self.computed[slots] += num_tokens - 1
        self.total[slots] += num_tokens - 1

    def known_tokens(self, slot: int) -> TokenIds:
        return self.tokens[slot, : self.known[slot]]

    def num_unused_positions(self) -> int:
        """Positions in held blocks without a token, over all slots. Uncomputed prompt tokens have their positions."""
        return int(np.maximum(self.capacity - self.total, 0).sum())
