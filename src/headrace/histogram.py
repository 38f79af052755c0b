"""Histograms as Prometheus defines them: a value belongs to the first bucket whose bound is not below it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """A snapshot of a histogram: a count for each bound and one for all above; empty if it was never filled."""

    counts: tuple[int, ...] = ()
    total: float = 0.0

    @property
    def num_values(self) -> int:
        return sum(self.counts)


class Histogram:
    """Filled by one thread, cheaply; other threads may take snapshots meanwhile."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_many(self, value: float, num_times: int) -> None:
        self.counts[bisect_left(self.bounds, value)] += num_times
        self.total += value * num_times

    def snapshot(self) -> HistogramCounts:
        return HistogramCounts(tuple(self.counts), self.total)
