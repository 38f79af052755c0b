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
NUM_BINS = 2048  # of pooled gaps, at their quantiles
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
    """The mean of rounds. None with fewer than two."""
    if len(values) < 2:
        return None
    found = np.asarray(values, dtype=np.float64)
    half = student_t(len(found) - 1) * float(found.std(ddof=1)) / math.sqrt(len(found))
    return Interval(float(found.mean()), float(found.mean()) - half, float(found.mean()) + half)


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
    a, b = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if min(len(a), len(b)) < 2:
        return None
    point_a, point_b = float(np.percentile(a, percent)), float(np.percentile(b, percent))
    if not (point_a > 0 and point_b > 0):
        return None
    rng = np.random.default_rng(SEED)
    found_a, found_b = _resampled(a, percent, rng), _resampled(b, percent, rng)
    return _percentile_interval(point_b / point_a, found_b / found_a)


def ratio_of_pooled(
    before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], percent: float
) -> Interval | None:
    """The ratio of a percentile of values pooled over requests, such as gaps between tokens.

    Whole requests are resampled: the gaps of one request are alike, and are no independent observations.
    """
    rng = np.random.default_rng(SEED)
    sides = []
    for requests in (before, after):
        kept = [values for values in requests if len(values)]
        if len(kept) < 2:
            return None
        pooled = np.concatenate([np.asarray(values, dtype=np.float64) for values in kept])
        point = float(np.percentile(pooled, percent))
        if not point > 0:
            return None
        sides.append((point, _resampled_pooled(kept, pooled, percent, rng)))
    (point_a, found_a), (point_b, found_b) = sides
    return _percentile_interval(point_b / point_a, found_b / found_a)


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


def _resampled(values: Floats, percent: float, rng: np.random.Generator) -> Floats:
    """The percentile of each resample."""
    size = max(1, min(NUM_RESAMPLES, MAX_RESAMPLED // len(values)))
    found = []
    for start in range(0, NUM_RESAMPLES, size):
        picks = rng.integers(len(values), size=(min(size, NUM_RESAMPLES - start), len(values)))
        found.append(np.percentile(values[picks], percent, axis=1))
    return np.concatenate(found)


def _resampled_pooled(
    requests: Sequence[Sequence[float]], pooled: Floats, percent: float, rng: np.random.Generator
) -> Floats:
    """The pooled percentile of each resample of requests. Values are counted in fine bins, one row a request, so that
    a resample is a sum of rows and not a sort of all values."""
    edges = np.unique(np.quantile(pooled, np.linspace(0, 1, NUM_BINS + 1)))
    if len(edges) < 2:
        return np.full(NUM_RESAMPLES, edges[0])
    counts = np.stack([np.histogram(values, bins=edges)[0] for values in requests]).astype(
        np.float32
    )  # [requests, bins]
    found = np.empty(NUM_RESAMPLES)
    size = max(1, min(NUM_RESAMPLES, MAX_RESAMPLED // max(len(requests), len(edges))))
    for start in range(0, NUM_RESAMPLES, size):
        number = min(size, NUM_RESAMPLES - start)
        weights = rng.multinomial(len(requests), np.full(len(requests), 1 / len(requests)), size=number)
        sums = np.cumsum(weights.astype(np.float32) @ counts, axis=1, dtype=np.float64)  # [resamples, bins]
        wanted = sums[:, -1] * percent / 100
        places = np.minimum((sums < wanted[:, None]).sum(axis=1), len(edges) - 2)
        rows = np.arange(number)
        below = np.where(places > 0, sums[rows, places - 1], 0.0)
        inside = np.maximum(sums[rows, places] - below, 1e-9)
        share = np.clip((wanted - below) / inside, 0, 1)
        found[start : start + number] = edges[places] + share * (edges[places + 1] - edges[places])
    return found
