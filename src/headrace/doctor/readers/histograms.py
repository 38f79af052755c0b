"""Quantiles of an interval: from how much the buckets of a histogram grew between two scrapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Cumulative:
    """A histogram since the start of a server, as Prometheus shows it: cumulative counts by upper bound."""

    counts: Mapping[float, float]
    total: float  # sum of all observations


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


def growth(names: Iterable[str], before: Mapping[str, Cumulative], after: Mapping[str, Cumulative]) -> Histogram | None:
    """The observations between two snapshots; of the first of these series that the server has."""
    found = next((name for name in names if name in after and after[name].counts), None)
    if found is None:
        return None
    new, old = after[found], before.get(found, Cumulative({}, 0.0))
    bounds = tuple(sorted(new.counts))
    grown = [max(0.0, new.counts[bound] - old.counts.get(bound, 0.0)) for bound in bounds]
    counts = [grown[0], *(max(0.0, b - a) for a, b in pairwise(grown))]
    return Histogram(bounds, tuple(counts), new.total - old.total)
