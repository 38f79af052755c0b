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

    def table(self, columns: Mapping[str, Column], *, span_s: float = SPAN_S) -> dict[str, list[float | None]]:
        """Columns of numbers for a dashboard, one row per sample, oldest first; None where there is no value."""
        times = self._live_times()
        first = int(np.searchsorted(times, times[-1] - span_s - ROUNDING_S)) if len(times) else 0
        shown = {"time": self._live_wall_times()[first:]}
        for name, column in columns.items():
            shown[name] = self._column(column)[first:]
        return {name: _as_json(values) for name, values in shown.items()}

    def _column(self, column: Column) -> Floats:
        rows = self._live_rows()[:, self._columns[column.source]]
        if column.quantile is not None:
            return self._quantiles_at(column.source, column.quantile, column.window_s, self._live_times())
        values: Floats = rows.sum(axis=1)
        if column.source.series.kind == "gauge" or not len(values):
            return values
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.diff(values, prepend=np.nan) / np.diff(self._live_times(), prepend=np.nan)

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
    """A column for a dashboard: a gauge, a counter's growth per second, or a quantile over the last `window_s`."""

    source: Source
    quantile: float | None = None
    window_s: float = 60.0


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
