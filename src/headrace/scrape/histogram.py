"""A histogram of a metrics page, and its quantiles."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations by bucket. `bounds` are upper ones, the last is infinite; `counts` are not cumulative."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float  # sum of all observations

    @property
    def count(self) -> float:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """Interpolated within its bucket. In the last one, its lower bound: the value is at least that."""
        if not self.count:
            return None
        rank, below = share * self.count, 0.0
        for place, count in enumerate(self.counts):
            if count and below + count >= rank:
                low = self.bounds[place - 1] if place else 0.0
                high = self.bounds[place]
                return low if math.isinf(high) else low + (high - low) * (rank - below) / count
            below += count
        return self.bounds[-2] if len(self.bounds) > 1 else None
