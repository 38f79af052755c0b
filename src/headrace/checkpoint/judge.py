"""Whether figures still hold: each against the recorded one, with a tolerance from the recorded noise.

    tolerance = t x s x sqrt(1/n + 1/m) / mean      n recorded rounds with standard deviation s, m new ones

which is the range of a new mean in 95 of 100 cases, and at least a stated minimum: rounds that follow each other differ
less than runs of different days. One recorded round has no noise, and a wider minimum. A figure that became better
holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

from headrace.bench.compare import FIGURES, Figure
from headrace.bench.values import is_number

Verdict = Literal["holds", "better", "worse", "too noisy", "missing"]
BY_NAME = {figure.name: figure for figure in FIGURES}
MAX_TOLERANCE = 0.5  # a figure that may halve proves nothing


@dataclass(frozen=True, slots=True)
class Minimum:
    """The least tolerance: with several recorded rounds, and with one."""

    with_rounds: float
    of_one_round: float


RATE, LATENCY, SHARE = Minimum(0.05, 0.10), Minimum(0.10, 0.25), Minimum(0.01, 0.01)


@dataclass(frozen=True, slots=True)
class Judgement:
    """One figure under one load. `ratio` is now to recorded; `tolerance` is the loss that still holds."""

    load: str
    figure: Figure
    recorded: float
    now: float | None
    ratio: float | None
    interval: tuple[float, float] | None
    tolerance: float
    basis: str  # of the tolerance
    verdict: Verdict


def minimum_of(figure: Figure) -> Minimum:
    if figure.name == "success_share":
        return SHARE
    return LATENCY if figure.latency is not None else RATE


def tolerance_of(recorded: Sequence[float], num_now: int, figure: Figure) -> tuple[float, str]:
    """The share by which a figure may be worse, and where it comes from."""
    minimum = minimum_of(figure)
    if len(recorded) < 2:
        return minimum.of_one_round, "one recorded round: the minimum without known noise"
    mean = fmean(recorded)
    if mean <= 0:
        return minimum.with_rounds, "the minimum"
    from headrace.bench.statistics import student_t

    noise = student_t(len(recorded) - 1) * stdev(recorded) * math.sqrt(1 / len(recorded) + 1 / max(1, num_now)) / mean
    if noise <= minimum.with_rounds:
        return minimum.with_rounds, f"the minimum; noise of {len(recorded)} recorded rounds: {100 * noise:.1f} %"
    return noise, f"noise of {len(recorded)} recorded rounds"


def judge(
    load: str, name: str, recorded: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> Judgement | None:
    """Judge one figure of a load's rounds. None if it was not recorded."""
    from headrace.bench.statistics import ratio_of_rounds

    figure = BY_NAME[name]
    before, after = values_of(name, recorded), values_of(name, now)
    if not before:
        return None
    tolerance, basis = tolerance_of(before, len(after), figure)
    mean_before, mean_after = fmean(before), fmean(after) if after else None
    ratio = mean_after / mean_before if mean_after is not None and mean_before > 0 else None
    interval = ratio_of_rounds(before, after)
    return Judgement(
        load,
        figure,
        mean_before,
        mean_after,
        ratio,
        None if interval is None else (interval.low, interval.high),
        tolerance,
        basis,
        _verdict(figure, mean_before, mean_after, ratio, tolerance),
    )


def values_of(name: str, rounds: Sequence[Mapping[str, Any]]) -> list[float]:
    return [float(each[name]) for each in rounds if is_number(each.get(name))]


def _verdict(figure: Figure, before: float, now: float | None, ratio: float | None, tolerance: float) -> Verdict:
    if now is None:
        return "missing"
    if ratio is None:  # recorded as 0
        is_better = now > before if figure.is_higher_better else now < before
        return "holds" if now == before else "better" if is_better else "worse"
    gain = ratio - 1 if figure.is_higher_better else 1 - ratio
    if tolerance > MAX_TOLERANCE:
        return "worse" if -gain > tolerance else "too noisy"
    if -gain > tolerance:
        return "worse"
    return "better" if gain > tolerance else "holds"
