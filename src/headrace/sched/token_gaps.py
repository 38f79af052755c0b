"""Inter-token latency: the time between a token and the one before it, for all slots of a step at once."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from headrace.histogram import Histogram
from headrace.sched.stats import TOKEN_GAP_BOUNDS
from headrace.steps import IntArray

Gaps = npt.NDArray[np.float64]

_NO_SLOTS: IntArray = np.empty(0, np.int64)
_BOUNDS = np.array(TOKEN_GAP_BOUNDS)


class TokenGaps:
    """Owns the arrival time of each slot's last token: `_now` for slots of the last step, `_last_at` for the others.

    As long as steps return tokens of the same slots, all gaps of a step are equal and are counted together.
    """

    def __init__(self, num_slots: int) -> None:
        self.histogram = Histogram(TOKEN_GAP_BOUNDS)
        self._last_at = np.full(num_slots, np.nan)
        self._slots = _NO_SLOTS
        self._now = 0.0

    def take(self, slots: IntArray, now: float) -> IntArray:
        """Record one token for each of these slots; returns the slots whose first token it is."""
        if len(slots) == len(self._slots) and (slots == self._slots).all():
            self.histogram.observe_many(now - self._now, len(slots))
            self._now = now
            return _NO_SLOTS
        self._settle()
        gaps = now - self._last_at[slots]
        is_first = np.isnan(gaps)
        self._observe(gaps[~is_first] if is_first.any() else gaps)
        self._slots, self._now = slots, now
        return slots[is_first]

    def enter(self, slot: int, last_at: float | None) -> None:
        """A sequence enters the slot; `last_at` is the time of its last token before a preemption, if it has one."""
        self._settle()
        self._last_at[slot] = np.nan if last_at is None else last_at

    def last_at(self, slot: int) -> float | None:
        """When the slot's last token arrived."""
        self._settle()
        last_at = float(self._last_at[slot])
        return None if np.isnan(last_at) else last_at

    def _settle(self) -> None:
        if len(self._slots):
            self._last_at[self._slots] = self._now
            self._slots = _NO_SLOTS

    def _observe(self, gaps: Gaps) -> None:
        if not len(gaps):
            return
        bounds, counts = self.histogram.bounds, self.histogram.counts
        lowest, highest = bisect_left(bounds, gaps.min()), bisect_left(bounds, gaps.max())
        if lowest == highest:  # nearly always: most slots were in the step before
            counts[lowest] += len(gaps)
        else:
            for place, count in enumerate(np.bincount(np.searchsorted(_BOUNDS, gaps)).tolist()):
                counts[place] += count
        self.histogram.total += float(gaps.sum())
