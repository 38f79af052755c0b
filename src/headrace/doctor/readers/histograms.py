"""Quantiles of an interval: from how much the buckets of a histogram grew between two scrapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headrace.bench.engines.metrics import Sample


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


def growth(names: Iterable[str], before: Sequence[Sample], after: Sequence[Sample]) -> Histogram | None:
    """The observations between two scrapes, of all engines of a server; of the first of these series that it has."""
    for name in names:
        new = _cumulative(name, after)
        if new:
            old = _cumulative(name, before)
            bounds = tuple(sorted(new))
            grown = [max(0.0, new[bound] - old.get(bound, 0.0)) for bound in bounds]
            counts = [grown[0], *(max(0.0, b - a) for a, b in pairwise(grown))]
            total = _sum(f"{name}_sum", after) - _sum(f"{name}_sum", before)
            return Histogram(bounds, tuple(counts), total)
    return None


def _cumulative(name: str, samples: Sequence[Sample]) -> dict[float, float]:
    """Cumulative counts by upper bound."""
    counts: dict[float, float] = {}
    for sample in samples:
        if sample.name == f"{name}_bucket" and "le" in sample.labels:
            bound = float(sample.labels["le"])
            counts[bound] = counts.get(bound, 0.0) + sample.value
    return counts


def _sum(name: str, samples: Sequence[Sample]) -> float:
    return sum(sample.value for sample in samples if sample.name == name)
