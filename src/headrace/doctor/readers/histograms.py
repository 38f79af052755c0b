"""Quantiles of an interval: from how much the buckets of a histogram grew between two scrapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from headrace.scrape.histogram import Histogram
from headrace.scrape.page import Sample

__all__ = ["Histogram", "growth"]


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
