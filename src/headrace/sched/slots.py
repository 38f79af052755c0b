"""Where every running sequence stands: one column a fact, one row a device slot, so that a step is a few array
operations however many rows there are.

    tokens   p p p p p a a a ? ?         p prompt, a answer, ? drawn on the device but not yet seen here
             └─────known─────┘
             └───────total───────┘       counts the tokens that submitted steps will have drawn
             └────computed─────┘         keys and values in the cache once submitted steps are done
"""

from __future__ import annotations

import heapq

import numpy as np

from headrace.sched.sequence import Sequence
from headrace.steps import IntArray
from headrace.types import TokenIds

NEVER = np.iinfo(np.int64).max


class SlotTable:
    """Owns the rows. A row is steady when exactly one known-to-come token is not computed yet: plain decoding."""

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.tokens = np.empty((num_slots, max_model_len), np.int32)  # memory is used as far as it is written
        self.known = np.zeros(num_slots, np.int64)
        self.total = np.zeros(num_slots, np.int64)
        self.computed = np.zeros(num_slots, np.int64)
        self.capacity = np.zeros(num_slots, np.int64)  # tokens that the row's blocks can hold
        self.end = np.zeros(num_slots, np.int64)
        self.prompt_len = np.zeros(num_slots, np.int64)
        self.cached = np.zeros(num_slots, np.int64)  # tokens that others had computed when the row was taken
        self.is_exact = np.zeros(num_slots, np.bool_)  # see Sequence
        self.since = np.full(
            num_slots, NEVER, np.int64
        )  # first step of the row's owner; earlier results are not its own
        self.is_watched = np.zeros(num_slots, np.bool_)  # its next token is news
        self._is_steady = np.zeros(num_slots, np.bool_)
        self._steady: IntArray | None = None
        self._free = list(range(num_slots))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_running(self) -> int:
        return len(self.sequences) - len(self._free)

    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence is not None]

    def steady(self) -> IntArray:
        """The steady rows, ascending; the same array object as long as nothing changed."""
        if self._steady is None:
            self._steady = np.flatnonzero(self._is_steady)
        return self._steady

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
        self.is_exact[slot] = sequence.is_exact
        self.since[slot] = step
        self.is_watched[slot] = sequence.delivers_next_token
        return slot

    def vacate(self, slot: int) -> None:
        self.sequences[slot] = None
        self.since[slot] = NEVER
        self.total[slot] = self.capacity[slot] = 0
        if self._is_steady[slot]:
            self._is_steady[slot] = False
            self._steady = None
        heapq.heappush(self._free, slot)

    def advance(self, slot: int, num_tokens: int) -> bool:
        """`num_tokens` more of a row are in a submitted step; whether the step draws its next token."""
        self.computed[slot] += num_tokens
        if self.computed[slot] < self.total[slot]:
            return False
        self.total[slot] += 1
        if self.total[slot] < self.end[slot]:
            self._is_steady[slot] = True
            self._steady = None
        return True

    def advance_steady(self, slots: IntArray) -> None:
        """All steady rows move on by one token; those that thereby reach their end leave."""
        self.computed[slots] += 1
        self.total[slots] += 1
        ended = slots[self.total[slots] >= self.end[slots]]
        if len(ended):
            self._is_steady[ended] = False
            self._steady = None

    def record(self, slots: IntArray, tokens: IntArray) -> None:
        self.tokens[slots, self.known[slots]] = tokens
        self.known[slots] += 1

    def known_tokens(self, slot: int) -> TokenIds:
        return self.tokens[slot, : self.known[slot]]

    def num_unused_positions(self) -> int:
        """Allocated places that no token has, over all rows (a prompt still being computed has its places)."""
        return int(np.maximum(self.capacity - self.total, 0).sum())
