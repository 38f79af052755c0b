"""Quantiles of an interval: from how much the buckets of a histogram grew between two scrapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from headrace.scrape.histogram import Histogram

__all__ = ["Cumulative", "Histogram", "growth"]


@dataclass(frozen=True, slots=True)
class Cumulative:
    """A histogram since the start of a server, as Prometheus shows it: cumulative counts by upper bound."""

    counts: Mapping[float, float]
    total: float  # sum of all observations


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
