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


class RowTable:
    """Owns the rows. A row is steady when exactly one known-to-come token is not computed yet: plain decoding."""

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        self.sequences: list[Sequence | None] = [None] * num_rows
        self.tokens = np.empty((num_rows, max_model_len), np.int32)  # memory is used as far as it is written
        self.known = np.zeros(num_rows, np.int64)
        self.total = np.zeros(num_rows, np.int64)
        self.computed = np.zeros(num_rows, np.int64)
        self.capacity = np.zeros(num_rows, np.int64)  # tokens that the row's blocks can hold
        self.end = np.zeros(num_rows, np.int64)
        self.prompt_len = np.zeros(num_rows, np.int64)
        self.cached = np.zeros(num_rows, np.int64)  # tokens that others had computed when the row was taken
        self.is_exact = np.zeros(num_rows, np.bool_)  # see Sequence
        self.since = np.full(
            num_rows, NEVER, np.int64
        )  # first step of the row's owner; earlier results are not its own
        self.is_watched = np.zeros(num_rows, np.bool_)  # its next token is news
        self._is_steady = np.zeros(num_rows, np.bool_)
        self._steady: IntArray | None = None
        self._free = list(range(num_rows))

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
        row = heapq.heappop(self._free)
        num_tokens = len(sequence.token_ids)
        self.sequences[row] = sequence
        self.tokens[row, :num_tokens] = sequence.token_ids
        self.known[row] = self.total[row] = num_tokens
        self.computed[row] = num_computed
        self.capacity[row] = capacity
        self.end[row] = sequence.end_len
        self.prompt_len[row] = sequence.prompt_len
        self.cached[row] = num_computed
        self.is_exact[row] = sequence.is_exact
        self.since[row] = step
        self.is_watched[row] = sequence.is_next_token_news
        return row

    def vacate(self, row: int) -> None:
        self.sequences[row] = None
        self.since[row] = NEVER
        self.total[row] = self.capacity[row] = 0
        if self._is_steady[row]:
            self._is_steady[row] = False
            self._steady = None
        heapq.heappush(self._free, row)

    def advance(self, row: int, num_tokens: int) -> bool:
        """`num_tokens` more of a row are in a submitted step; whether the step draws its next token."""
        self.computed[row] += num_tokens
        if self.computed[row] < self.total[row]:
            return False
        self.total[row] += 1
        if self.total[row] < self.end[row]:
            self._is_steady[row] = True
            self._steady = None
        return True

    def advance_steady(self, rows: IntArray) -> None:
        """All steady rows move on by one token; those that thereby reach their end leave."""
        self.computed[rows] += 1
        self.total[rows] += 1
        ended = rows[self.total[rows] >= self.end[rows]]
        if len(ended):
            self._is_steady[ended] = False
            self._steady = None

    def record(self, rows: IntArray, tokens: IntArray) -> None:
        self.tokens[rows, self.known[rows]] = tokens
        self.known[rows] += 1

    def known_tokens(self, row: int) -> TokenIds:
        return self.tokens[row, : self.known[row]]

    def num_unused_slots(self) -> int:
        """Allocated places that no token has, over all rows (a prompt still being computed has its places)."""
        return int(np.maximum(self.capacity - self.total, 0).sum())
