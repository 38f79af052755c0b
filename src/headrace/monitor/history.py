"""The server's recent history in memory: samples of its own metrics, for alerts and for a dashboard.

A sample is one row of numbers; the rows are in one array of fixed size, and the oldest are dropped:

    time      gauge   counter   buckets of a histogram
    12:00:00  0.41    1027      3  17  240  2
    12:00:10  0.43    1100      3  19  251  2
                      --------------------------  these columns only grow: a reset is added to what was before

Rates and quantiles over any window are differences of two rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.monitor.conditions import Source

Floats = NDArray[np.float64]
Reading = float | Sequence[int] | None  # of a gauge or counter; of a histogram; None: it has no value now

INTERVAL_S = 10.0  # between two samples
SPAN_S = 3600.0  # what a dashboard shows
ROUNDING_S = 1e-6  # of times


@dataclass(frozen=True, slots=True)
class Growth:
    """What a counter, or each bucket of a histogram, grew by within `seconds`."""

    counts: Floats
    seconds: float

    @property
    def total(self) -> float:
        return float(self.counts.sum())


class History:
    """Owned by one thread. `record` adds a sample; everything else reads."""

    def __init__(self, sources: Iterable[Source], *, span_s: float = SPAN_S, interval_s: float = INTERVAL_S) -> None:
        self.interval_s = interval_s
        self.max_samples = int(span_s / interval_s) + 2
        self._columns: dict[Source, slice] = {}
        width = 0
        for source in dict.fromkeys(sources):
            num_columns = len(_bounds(source)) + 1 if source.series.kind == "histogram" else 1
            self._columns[source] = slice(width, width + num_columns)
            width += num_columns
        self._grows = np.zeros(width, bool)
        for source, columns in self._columns.items():
            self._grows[columns] = source.series.kind != "gauge"
        # Twice the size: rows are appended, and the newest half is moved to the front when the end is reached. The
        # live rows are always contiguous.
        self._rows = np.full((2 * self.max_samples, width), np.nan)
        self._times = np.zeros(2 * self.max_samples)  # of a monotonic clock
        self._wall_times = np.zeros(2 * self.max_samples)
        self._end = 0
        self.num_recorded = 0  # samples since the start, dropped ones included
        self._raw = np.zeros(width)  # the last sample as it was read
        self._before_resets = np.zeros(width)

    @property
    def sources(self) -> tuple[Source, ...]:
        return tuple(self._columns)

    @property
    def num_bytes(self) -> int:
        """The memory of the arrays, which never grow."""
        return sum(array.nbytes for array in (self._rows, self._times, self._wall_times))

    def __len__(self) -> int:
        return min(self._end, self.max_samples)

    @property
    def seconds(self) -> float:
        """The time between the oldest and the newest sample."""
        times = self._live_times()
        return float(times[-1] - times[0]) if len(times) else 0.0

    def record(self, readings: Mapping[Source, Reading], *, now: float, wall_time: float) -> None:
        """Add a sample. `now` is the time of a monotonic clock."""
        if self._end == len(self._times):
            self._move_to_front()
        row = np.full(len(self._raw), np.nan)
        for source, columns in self._columns.items():
            reading = readings[source]
            if reading is not None:
                row[columns] = reading
        self._rows[self._end] = self._without_resets(row)
        self._times[self._end] = now
        self._wall_times[self._end] = wall_time
        self._end += 1
        self.num_recorded += 1

    # ---- reading

    def latest(self, source: Source) -> float | None:
        """The value of a gauge in the newest sample."""
        if not len(self):
            return None
        value = float(self._live_rows()[-1, self._columns[source]].sum())
        return None if np.isnan(value) else value

    def growth(self, source: Source, window_s: float, *, ago_s: float = 0.0) -> Growth | None:
        """The growth within a window that ended `ago_s` before the newest sample; None without two samples in it."""
        if not len(self):
            return None
        times = self._live_times()
        first, last = self._window(times[-1:] - ago_s, window_s)
        if last[0] < 0 or times[last[0]] <= times[first[0]]:
            return None
        rows = self._live_rows()[:, self._columns[source]]
        return Growth(rows[last[0]] - rows[first[0]], float(times[last[0]] - times[first[0]]))

    def quantile(self, source: Source, quantile: float, window_s: float) -> float | None:
        """A quantile of what a histogram counted within a window up to now; None if it counted nothing."""
        grown = self.growth(source, window_s)
        if grown is None:
            return None
        value = float(quantiles(grown.counts[None], _bounds(source), quantile)[0])
        return None if np.isnan(value) else value

    def median_quantile(
        self, source: Source, quantile: float, window_s: float, *, span_s: float, step_s: float, ago_s: float
    ) -> float | None:
        """The median of a quantile over windows that end every `step_s` in `span_s`, up to `ago_s` before now."""
        if not len(self):
            return None
        newest = self._live_times()[-1] - ago_s
        ends = newest - np.arange(0.0, span_s + ROUNDING_S, step_s)
        values = self._quantiles_at(source, quantile, window_s, ends)
        values = values[~np.isnan(values)]
        return float(np.median(values)) if len(values) else None

    def table(
        self, columns: Mapping[str, Column], *, span_s: float = SPAN_S, after: int = 0
    ) -> dict[str, list[float | None]]:
        """Columns of numbers for a dashboard, one row per sample, oldest first; None where there is no value.

        `after`: without the first `after` samples since the start, which the reader has.
        """
        times = self._live_times()
        first = int(np.searchsorted(times, times[-1] - span_s - ROUNDING_S)) if len(times) else 0
        first = min(max(first, after - (self.num_recorded - len(self))), len(self))
        if first == len(self):
            return {name: [] for name in ("time", *columns)}
        shown = {"time": self._live_wall_times()[first:]}
        for name, column in columns.items():
            shown[name] = self._column(column, first)
        return {name: _as_json(values) for name, values in shown.items()}

    def now(
        self, columns: Mapping[str, Column], readings: Mapping[Source, Reading], *, now: float
    ) -> dict[str, float | None]:
        """The same columns at this moment, between two samples. Rates are over the last `interval_s` or a little more.

        `readings` has the sources of the columns; gauges need not be in the history.
        """
        found = {name: self._value_now(column, readings, now) for name, column in columns.items()}
        return {name: None if value is None or not np.isfinite(value) else value for name, value in found.items()}

    def _value_now(self, column: Column, readings: Mapping[Source, Reading], now: float) -> float | None:
        source = column.source
        if source.series.kind == "gauge":
            reading = readings[source]
            assert not isinstance(reading, Sequence), f"{source.series.name} is a gauge"
            return reading
        window_s = column.window_s if column.quantile is not None or column.per is not None else self.interval_s
        grown = self._growth_until(source, readings[source], now, window_s)
        if grown is None:
            return None
        if column.quantile is not None:
            return float(quantiles(grown.counts[None], _bounds(source), column.quantile)[0])
        if column.per is None:
            return grown.total / grown.seconds
        whole = self._growth_until(column.per, readings[column.per], now, window_s)
        return grown.total / whole.total if whole is not None and whole.total else None

    def _growth_until(self, source: Source, reading: Reading, now: float, window_s: float) -> Growth | None:
        """The growth since the last sample that is at least `window_s` old, or since the first one."""
        times, columns = self._live_times(), self._columns[source]
        if not len(times) or now <= times[0] or reading is None:
            return None
        first = max(0, int(np.searchsorted(times, now - window_s + ROUNDING_S)) - 1)
        raw, value = self._raw[columns], np.asarray(reading, float)
        value = value + self._before_resets[columns] + np.where(value < raw, raw, 0.0)
        return Growth(value - self._live_rows()[first, columns], float(now - times[first]))

    def _column(self, column: Column, first: int) -> Floats:
        """The values of a column in the samples from `first` on."""
        times = self._live_times()
        if column.quantile is not None:
            return self._quantiles_at(column.source, column.quantile, column.window_s, times[first:])
        if column.per is not None:
            return self._shares_at(column.source, column.per, column.window_s, times[first:])
        before = max(0, first - 1)  # a rate needs the sample before
        values: Floats = self._live_rows()[before:, self._columns[column.source]].sum(axis=1)
        if column.source.series.kind != "gauge" and len(values):
            with np.errstate(divide="ignore", invalid="ignore"):
                values = np.diff(values, prepend=np.nan) / np.diff(times[before:], prepend=np.nan)
        return values[first - before :]

    def _shares_at(self, part: Source, whole: Source, window_s: float, ends: Floats) -> Floats:
        """One growth divided by another for each window; NaN where the second is 0."""
        if not len(self):
            return np.zeros(0)
        first, last = self._window(ends, window_s)
        grown = []
        for source in (part, whole):
            values = self._live_rows()[:, self._columns[source]].sum(axis=1)
            grown.append(values[np.maximum(last, 0)] - values[first])
        with np.errstate(divide="ignore", invalid="ignore"):
            shares: Floats = np.where(last > first, grown[0] / grown[1], np.nan)
        return shares

    def _quantiles_at(self, source: Source, quantile: float, window_s: float, ends: Floats) -> Floats:
        """A quantile for each window that ends at one of these times; NaN where nothing was counted."""
        if not len(self):
            return np.zeros(0)
        first, last = self._window(ends, window_s)
        rows = self._live_rows()[:, self._columns[source]]
        values = quantiles(rows[np.maximum(last, 0)] - rows[first], _bounds(source), quantile)
        values[last <= first] = np.nan
        return values

    def _window(self, ends: Floats, window_s: float) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The first and the last sample of each window; the last is before the first where it has no samples."""
        times = self._live_times()
        last = np.searchsorted(times, ends + ROUNDING_S, side="right") - 1
        first = np.searchsorted(times, ends - window_s - ROUNDING_S, side="left")
        return np.minimum(first, len(times) - 1), last

    # ---- storage

    def _live_rows(self) -> Floats:
        return self._rows[self._end - len(self) : self._end]

    def _live_times(self) -> Floats:
        return self._times[self._end - len(self) : self._end]

    def _live_wall_times(self) -> Floats:
        return self._wall_times[self._end - len(self) : self._end]

    def _move_to_front(self) -> None:
        num_kept = self.max_samples
        for array in (self._rows, self._times, self._wall_times):
            array[:num_kept] = array[self._end - num_kept : self._end]
        self._end = num_kept

    def _without_resets(self, row: Floats) -> Floats:
        """Make columns that only grow monotonic. One that has no value now keeps its last one."""
        grows = self._grows
        row[grows] = np.where(np.isnan(row[grows]), self._raw[grows], row[grows])
        was_reset = grows & (row < self._raw)
        self._before_resets[was_reset] += self._raw[was_reset]
        self._raw[grows] = row[grows]
        return row + self._before_resets


@dataclass(frozen=True, slots=True)
class Column:
    """A column for a dashboard: a gauge, a counter's growth per second, a quantile over the last `window_s`, or the
    growth of one counter divided by that of another (`per`) over that time."""

    source: Source
    quantile: float | None = None
    window_s: float = 60.0
    per: Source | None = None

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.source,) if self.per is None else (self.source, self.per)


def quantiles(counts: Floats, bounds: Sequence[float], quantile: float) -> Floats:
    """As Prometheus' histogram_quantile: linear within a bucket, the highest bound above it, NaN without values.

    counts: [windows, bounds + 1]
    """
    up_to = counts.cumsum(axis=1)
    totals = up_to[:, -1]
    ranks = quantile * totals
    found = np.minimum((up_to < ranks[:, None]).sum(axis=1), len(bounds) - 1)  # the first bucket that holds the rank
    each = np.arange(len(counts))
    edges = np.concatenate(([0.0], bounds))
    in_bucket = counts[each, found]
    below = up_to[each, found] - in_bucket
    with np.errstate(divide="ignore", invalid="ignore"):
        values: Floats = edges[found] + (edges[found + 1] - edges[found]) * (ranks - below) / in_bucket
    is_above_all = up_to[:, -2] < ranks
    values[is_above_all] = bounds[-1]
    values[~(totals > 0)] = np.nan
    return values


def _bounds(source: Source) -> tuple[float, ...]:
    bounds = source.series.bounds
    assert bounds is not None, f"{source.series.name} has no fixed buckets"
    return bounds


def _as_json(values: Floats) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in values.tolist()]
