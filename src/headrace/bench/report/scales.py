"""Axes: from values to places in a chart, with ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

NUM_TICKS = 5
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis shows. `ticks` replaces the round numbers, for values that are levels and not a continuum."""

    label: str
    is_log: bool = False
    starts_at_zero: bool = True
    ticks: tuple[float, ...] = ()
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis with its range and its place in pixels. `start` may be larger than `end`: y grows downwards."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return self.start + (self.end - self.start) * (at - low) / (high - low)

    def labels(self) -> list[str]:
        return tick_labels(self.ticks, is_log=self.is_log)


def scale(axis: Axis, values: Iterable[float], start: float, end: float) -> Scale:
    """The scale that shows all of these values."""
    found = [value for value in (*values, *axis.ticks) if math.isfinite(value) and (value > 0 or not axis.is_log)]
    if axis.is_log:
        low, high, ticks = _log_range(min(found, default=1.0), max(found, default=10.0))
    else:
        low, high, ticks = _linear_range(axis, min(found, default=0.0), max(found, default=1.0))
    return Scale(low, high, start, end, axis.is_log, axis.ticks or ticks)


def _linear_range(axis: Axis, low: float, high: float) -> tuple[float, float, tuple[float, ...]]:
    if axis.starts_at_zero:
        low, high = min(0.0, low), max(0.0, high)
    if low == high:
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
    ticks = round_ticks(low, axis.high if axis.high is not None else high)
    return min(low, ticks[0]), axis.high if axis.high is not None else max(high, ticks[-1]), ticks


def _log_range(low: float, high: float) -> tuple[float, float, tuple[float, ...]]:
    if high / low < 1.05:
        low, high = low / 2, high * 2
    margin = (high / low) ** 0.04
    low, high = low / margin, high * margin
    return low, high, log_ticks(low, high)


def round_ticks(low: float, high: float) -> tuple[float, ...]:
    """About NUM_TICKS multiples of 1, 2, 2.5 or 5 times a power of ten, around low and high."""
    raw = (high - low) / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in STEPS if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(round(place * step, 12) for place in range(first, last + 1))


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Powers of ten; 1, 2, 5 of each over less than three; round numbers within less than one."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    decades = math.log10(high / low)
    factors = (1, 2, 5) if decades < 3 else (1,)
    ticks = [factor * 10.0**exponent for exponent in exponents for factor in factors]
    within = tuple(tick for tick in ticks if low <= tick <= high)
    if len(within) >= 3:
        return within
    return tuple(tick for tick in round_ticks(low, high) if low <= tick <= high)


def tick_labels(ticks: Iterable[float], *, is_log: bool = False) -> list[str]:
    """Labels with as many decimals as the ticks need to differ."""
    found = list(ticks)
    if is_log:
        return [compact(tick) for tick in found]
    if max(map(abs, found), default=0.0) >= 10_000:
        return [compact(tick) for tick in found]
    for decimals in range(7):
        if all(abs(tick - round(tick, decimals)) < 1e-9 * max(1.0, abs(tick)) for tick in found):
            return [f"{tick:,.{decimals}f}" for tick in found]
    return [f"{tick:g}" for tick in found]


def compact(value: float) -> str:
    """1,500 as 1,500; 15,000 as 15k; 2,500,000 as 2.5M."""
    for limit, unit, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / unit:.4g}{suffix}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
