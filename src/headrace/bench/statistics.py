"""Ratios with 95 % intervals, by a seeded bootstrap. Only numpy.

Rounds of a benchmark are few, and the plain percentile bootstrap of few values is too narrow. Its interval is widened
by Student's t and by n / (n - 1), as is known for small samples ("expanded percentile interval"); tests check that
95 % of the intervals of simulated rounds hold the true ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NUM_RESAMPLES = 2000
SEED = 20_261_116
MAX_RESAMPLED = 4_000_000  # values in memory at a time
NUM_BINS = 1024  # of pooled gaps, at their quantiles
Z = 1.959964
# Student's t for 95 %, two-sided, by degrees of freedom 1 to 30. Above: Z + 2.4 / n is within 0.3 %.
STUDENT_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with the range that holds the true value in 95 of 100 cases."""

    value: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def student_t(degrees: int) -> float:
    return STUDENT_T[degrees - 1] if degrees <= len(STUDENT_T) else Z + 2.4 / degrees


def mean_interval(values: Sequence[float]) -> Interval | None:
    """The mean of rounds, by Student's t. None with fewer than two. Rates are not negative, so neither is the range."""
    if len(values) < 2:
        return None
    found = np.asarray(values, dtype=np.float64)
    half = student_t(len(found) - 1) * float(found.std(ddof=1)) / math.sqrt(len(found))
    mean = float(found.mean())
    return Interval(mean, max(0.0, mean - half) if found.min() >= 0 else mean - half, mean + half)


def ratio_of_rounds(before: Sequence[float], after: Sequence[float], *, is_paired: bool = False) -> Interval | None:
    """The ratio of means, after to before. Paired rounds are resampled together, so that what both saw cancels out.

    None if a side has fewer than two rounds, or a mean that is not above 0.
    """
    a, b = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if min(len(a), len(b)) < 2 or not (a.mean() > 0 and b.mean() > 0):
        return None
    is_paired = is_paired and len(a) == len(b)
    rng = np.random.default_rng(SEED)
    picks_a = rng.integers(len(a), size=(NUM_RESAMPLES, len(a)))
    picks_b = picks_a if is_paired else rng.integers(len(b), size=(NUM_RESAMPLES, len(b)))
    means_a, means_b = a[picks_a].mean(axis=1), b[picks_b].mean(axis=1)
    usable = (means_a > 0) & (means_b > 0)
    return _log_interval(
        float(b.mean() / a.mean()), np.log(means_b[usable] / means_a[usable]), _widening(a, b, is_paired=is_paired)
    )


def ratio_of_percentiles(before: Sequence[float], after: Sequence[float], percent: float) -> Interval | None:
    """The ratio of a percentile of two sets of requests, each resampled on its own."""
    a, b = np.sort(np.asarray(before, dtype=np.float64)), np.sort(np.asarray(after, dtype=np.float64))
    if min(len(a), len(b)) < 2:
        return None
    point_a, point_b = float(np.percentile(a, percent)), float(np.percentile(b, percent))
    if not (point_a > 0 and point_b > 0):
        return None
    rng = np.random.default_rng(SEED)
    found_a, found_b = _resampled(a, percent, rng), _resampled(b, percent, rng)
    return _percentile_interval(point_b / point_a, found_b / found_a)


def ratios_of_pooled(
    before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], percents: Sequence[float]
) -> list[Interval | None]:
    """The ratios of percentiles of values pooled over requests, such as gaps between tokens.

    Whole requests are resampled: the gaps of one request are alike, and are no independent observations.
    """
    rng = np.random.default_rng(SEED)
    sides = []
    for requests in (before, after):
        kept = [np.asarray(values, dtype=np.float64) for values in requests if len(values)]
        if len(kept) < 2:
            return [None] * len(percents)
        pooled = np.concatenate(kept)
        sides.append((np.percentile(pooled, percents), _resampled_pooled(kept, pooled, percents, rng)))
    (points_a, found_a), (points_b, found_b) = sides
    return [
        _percentile_interval(float(points_b[i] / points_a[i]), found_b[i] / found_a[i])
        if points_a[i] > 0 and points_b[i] > 0
        else None
        for i in range(len(percents))
    ]


def ratio_of_shares(before: tuple[int, int], after: tuple[int, int]) -> Interval | None:
    """The ratio of two shares, each given as count and total. None if a total or the first count is 0."""
    (met_a, total_a), (met_b, total_b) = before, after
    if not (total_a and total_b and met_a):
        return None
    rng = np.random.default_rng(SEED)
    # Half an observation is added to each side, so that a share of 0 or 1 is not certain.
    shares = [rng.beta(met + 0.5, total - met + 0.5, NUM_RESAMPLES) for met, total in (before, after)]
    low, high = np.percentile(shares[1] / shares[0], [2.5, 97.5])
    value = (met_b / total_b) / (met_a / total_a)
    return Interval(value, min(float(low), value), max(float(high), value))


def _widening(a: Floats, b: Floats, *, is_paired: bool) -> float:
    """The bootstrap of n values has (n - 1) / n of their variance, and a normal tail where Student's is longer.

    Of unpaired sides, the degrees of freedom are Welch's.
    """
    if is_paired:
        return student_t(len(a) - 1) / Z * math.sqrt(len(a) / (len(a) - 1))
    parts = [float(np.var(side / side.mean(), ddof=1)) / len(side) for side in (a, b)]
    total = sum(parts)
    if total == 0:
        return 1.0
    welch = total**2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, (a, b), strict=True))
    smallest = min(len(a), len(b))
    return student_t(max(1, math.floor(welch))) / Z * math.sqrt(smallest / (smallest - 1))


def _log_interval(value: float, logs: Floats, widening: float) -> Interval:
    middle = math.log(value)
    low, high = (middle + widening * (float(edge) - middle) for edge in np.percentile(logs, [2.5, 97.5]))
    return Interval(value, math.exp(min(low, middle)), math.exp(max(high, middle)))


def _percentile_interval(value: float, ratios: Floats) -> Interval:
    low, high = np.percentile(ratios[np.isfinite(ratios)], [2.5, 97.5])
    return Interval(value, min(float(low), value), max(float(high), value))


def _resampled(ordered: Floats, percent: float, rng: np.random.Generator) -> Floats:
    """The percentile of each resample, without making the resamples.

    A resample of n values is n uniform places in their order; the k-th smallest of n uniform numbers has a beta
    distribution, and the next one, given it, another. So two numbers for each resample are enough, and exact.
    """
    count = len(ordered)
    place = (count - 1) * percent / 100
    rank = min(math.floor(place) + 1, count - 1)  # of the lower neighbour, from 1
    lower = rng.beta(rank, count - rank + 1, NUM_RESAMPLES)
    upper = lower + (1 - lower) * rng.beta(1, count - rank, NUM_RESAMPLES)
    low, high = (ordered[np.minimum((count * each).astype(np.int64), count - 1)] for each in (lower, upper))
    found: Floats = low + (high - low) * (place - (rank - 1))
    return found


def _resampled_pooled(
    requests: Sequence[Floats], pooled: Floats, percents: Sequence[float], rng: np.random.Generator
) -> list[Floats]:
    """The pooled percentiles of each resample of requests. Values are counted in fine bins, one row a request, so that
    a resample is a sum of rows and not a sort of all values."""
    edges = np.unique(np.quantile(pooled, np.linspace(0, 1, NUM_BINS + 1)))
    if len(edges) < 2:
        return [np.full(NUM_RESAMPLES, edges[0]) for _ in percents]
    num_bins, num_requests = len(edges) - 1, len(requests)
    bins = np.clip(np.searchsorted(edges, pooled, side="right") - 1, 0, num_bins - 1)
    owners = np.repeat(np.arange(num_requests), [len(values) for values in requests])
    counts = np.bincount(owners * num_bins + bins, minlength=num_requests * num_bins)
    counts = counts.reshape(num_requests, num_bins).astype(np.float32)
    found: list[list[Floats]] = [[] for _ in percents]
    size = max(1, min(NUM_RESAMPLES, MAX_RESAMPLED // max(num_requests, num_bins)))
    for start in range(0, NUM_RESAMPLES, size):
        number = min(size, NUM_RESAMPLES - start)
        picks = rng.integers(num_requests, size=(number, num_requests)) + num_requests * np.arange(number)[:, None]
        weights = np.bincount(picks.ravel(), minlength=number * num_requests).reshape(number, num_requests)
        sums = np.cumsum(weights.astype(np.float32) @ counts, axis=1, dtype=np.float64)  # [resamples, bins]
        for percent, values in zip(percents, found, strict=True):
            values.append(_within_bins(sums, edges, percent))
    return [np.concatenate(values) for values in found]


def _within_bins(sums: Floats, edges: Floats, percent: float) -> Floats:
    """The percentile of each row of cumulative counts, interpolated within its bin."""
    wanted = sums[:, -1] * percent / 100
    places = np.minimum((sums < wanted[:, None]).sum(axis=1), len(edges) - 2)
    rows = np.arange(len(sums))
    below = np.where(places > 0, sums[rows, places - 1], 0.0)
    share = np.clip((wanted - below) / np.maximum(sums[rows, places] - below, 1e-9), 0, 1)
    found: Floats = edges[places] + share * (edges[places + 1] - edges[places])
    return found
