"""Divides the running sequences into micro-batches, so that every stage of a pipeline has a step to compute.

    stage 0   A B A B ...       the plan of A's next step needs the tokens of its last one, which the last stage samples
    stage 1     A B A B ...

A plan takes at most its share of the sequences, so as many plans as there are stages hold all of them. No more are in
flight: smaller groups would only read the weights more often. A sequence whose token is still in the pipeline is left
out. Chunks of a prompt need no token: they may follow each other at once.
"""

from __future__ import annotations

import numpy as np

from headrace.sched.slots import SlotTable
from headrace.steps import IntArray


class Microbatches:
    """Chooses the decoding slots of each plan. With one stage a plan takes all: the device has the tokens itself."""

    def __init__(self, num_stages: int, slots: SlotTable) -> None:
        self._num_stages = num_stages
        self._slots = slots
        self.num_in_flight = 0  # plans without a result
        self._last_steps = np.zeros(len(slots.sequences), np.int64)  # in which a slot last decoded

    @property
    def is_single(self) -> bool:
        return self._num_stages == 1

    @property
    def is_full(self) -> bool:
        """Whether every stage has a step."""
        return not self.is_single and self.num_in_flight >= self._num_stages

    def max_seqs(self, num_runnable: int, step: int) -> int | None:
        """How many of the sequences that run, or could start now, the plan of a step may take; None: any number."""
        if self.is_single:
            return None
        size, num_larger = divmod(num_runnable, self._num_stages)
        return max(1, size + int(step % self._num_stages < num_larger))

    def share_of(self, decoding: IntArray, max_seqs: int | None) -> IntArray:
        """Of the decoding slots, as many as a plan may take: those whose last token is known here and that have waited
        longest. Ascending."""
        if max_seqs is None:
            return decoding
        is_known = self._slots.known[decoding] == self._slots.total[decoding]
        slots = decoding if is_known.all() else decoding[is_known]
        if len(slots) <= max_seqs:
            return slots
        oldest = np.argsort(self._last_steps[slots], kind="stable")[:max_seqs]
        return np.sort(slots[oldest])

    def planned(self, slots: IntArray, step: int) -> IntArray | None:
        """Note the decoding slots of a plan; returns the token of each, which the first stage does not have."""
        if self.is_single:
            return None
        self._last_steps[slots] = step
        return self._slots.tokens[slots, self._slots.known[slots] - 1].astype(np.int64)
