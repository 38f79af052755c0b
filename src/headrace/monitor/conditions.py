"""Conditions of alerts as data: what is measured, over which window, and compared with what.

Two back ends read them: `promql.py` writes them as PromQL, `evaluation.py` computes them from the server's own history.

    Condition = value  operator  threshold          [while further conditions hold]
                  |                  |
                  Level | Rate | Increase           a number, or a multiple of a `Baseline`
                  | Quantile | Share | Missing
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from headrace.monitor.series import Series

Operator = Literal[">", "<", "=="]


@dataclass(frozen=True, slots=True)
class Source:
    """The samples of a series, summed over its own labels. `where` gives the accepted values of some labels."""

    series: Series
    where: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Level:
    """The current value of a gauge."""

    source: Source


@dataclass(frozen=True, slots=True)
class Rate:
    """Growth of a counter per second, over a window."""

    source: Source
    window_s: int


@dataclass(frozen=True, slots=True)
class Increase:
    """Growth of a counter over a window."""

    source: Source
    window_s: int


@dataclass(frozen=True, slots=True)
class Quantile:
    """A quantile of what a histogram counted in a window."""

    source: Source
    quantile: float
    window_s: int


@dataclass(frozen=True, slots=True)
class Share:
    """One rate divided by another; there is none while the second is 0."""

    part: Rate
    whole: Rate


@dataclass(frozen=True, slots=True)
class Missing:
    """1 while the series is absent; no value while it is there."""

    source: Source


Value = Level | Rate | Increase | Quantile | Share | Missing


@dataclass(frozen=True, slots=True)
class Baseline:
    """The usual value of a quantile: the median of its windows, one every `step_s`, over `span_s`.

    It ends one window ago, so that the current window is compared with others only. It is unknown while `requests`, a
    histogram with one observation per request, has counted fewer than `min_requests` in that time.
    """

    of: Quantile
    requests: Source
    span_s: int = 3600
    step_s: int = 60
    min_requests: int = 200

    @property
    def ago_s(self) -> int:
        """How long ago it ends."""
        return self.of.window_s


@dataclass(frozen=True, slots=True)
class Multiple:
    """A threshold: a multiple of a baseline."""

    factor: float
    baseline: Baseline


@dataclass(frozen=True, slots=True)
class Condition:
    value: Value
    operator: Operator
    threshold: float | Multiple
    also: tuple[Condition, ...] = ()  # must hold too


def sources_of(condition: Condition) -> Iterator[Source]:
    """Every source that a condition reads."""
    match condition.value:
        case Share(part, whole):
            yield from (part.source, whole.source)
        case value:
            yield value.source
    if isinstance(condition.threshold, Multiple):
        yield condition.threshold.baseline.of.source
        yield condition.threshold.baseline.requests
    for other in condition.also:
        yield from sources_of(other)


def lookback_s(condition: Condition) -> int:
    """How old the oldest sample is that a condition reads."""
    match condition.value:
        case Level() | Missing():
            seconds = 0
        case Share(part, whole):
            seconds = max(part.window_s, whole.window_s)
        case value:
            seconds = value.window_s
    if isinstance(condition.threshold, Multiple):
        baseline = condition.threshold.baseline
        seconds = max(seconds, baseline.ago_s + baseline.span_s + baseline.of.window_s)
    return max(seconds, *(lookback_s(other) for other in condition.also), 0)
