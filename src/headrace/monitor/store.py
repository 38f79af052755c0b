"""Stores the values of metrics: those of one engine, of the server as a whole, or of both where there is one engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from threading import Lock

from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

from headrace.histogram import Histogram, HistogramCounts
from headrace.monitor.series import Alias, Series, token_bounds

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Values:
    """A copy of all values at one moment, by series name. Histograms count by the bounds of their series."""

    numbers: Mapping[str, Mapping[Labels, float]]
    counts: Mapping[str, HistogramCounts]


OTHER = "other"
MAX_LABEL_VALUES = 200  # per series; further label values come from user input and are counted as `other`


class Store:
    """Owns its values. Everything takes the lock, except counting into a histogram."""

    def __init__(self, series: Sequence[Series], base_labels: Mapping[str, str], max_model_len: int) -> None:
        self._series = series
        self._base_labels = base_labels
        self._lock = Lock()
        self._values: dict[str, dict[Labels, float]] = {s.name: {} for s in series if s.kind != "histogram"}
        self._histograms = {
            s.name: Histogram(token_bounds(max_model_len) if s.bounds is None else s.bounds)
            for s in series
            if s.kind == "histogram"
        }

    def histogram(self, series: Series) -> Histogram:
        """The histogram to count into, from one thread only."""
        return self._histograms[series.name]

    def set(self, series: Series, value: float, *labels: str) -> None:
        with self._lock:
            self._values[series.name][labels] = value

    def add(self, series: Series, value: float, *labels: str) -> None:
        with self._lock:
            values = self._values[series.name]
            if labels not in values and len(values) >= MAX_LABEL_VALUES:
                labels = (OTHER,) * len(labels)
            values[labels] = values.get(labels, 0.0) + value

    def add_counts(self, series: Series, added: HistogramCounts) -> None:
        histogram = self._histograms[series.name]
        with self._lock:
            for position, count in enumerate(added.counts):
                histogram.counts[position] += count
            histogram.total += added.total

    def clear(self, *series: Series) -> None:
        """Remove their values: a scrape no longer exports them."""
        with self._lock:
            for one in series:
                self._values[one.name].clear()

    def read(self, series: Series, where: Sequence[tuple[str, tuple[str, ...]]] = ()) -> float | Sequence[int] | None:
        """The sum of a series' samples with the accepted label values, or the counts of a histogram.

        None: it is a gauge without a value.
        """
        if series.kind == "histogram":
            return self._histograms[series.name].snapshot().counts
        accepted = [(series.labels.index(label), values) for label, values in where]
        with self._lock:
            found = [
                value
                for labels, value in self._values[series.name].items()
                if all(labels[position] in values for position, values in accepted)
            ]
        return sum(found) if found or series.kind == "counter" else None

    def copy(self) -> Values:
        with self._lock:
            numbers = {name: dict(of_series) for name, of_series in self._values.items()}
            counts = {name: histogram.snapshot() for name, histogram in self._histograms.items()}
        return Values(numbers, counts)

    def bounds(self, series: Series) -> tuple[float, ...]:
        """The upper bounds of a histogram's buckets, without the last, which is infinite."""
        return self._histograms[series.name].bounds

    def show(self, metric: Metric, series: Series, alias: Alias, values: Values) -> None:
        """Add the samples of a series to a metric, with the base labels that this store has."""
        base = {label: self._base_labels[label] for label in alias.base_labels if label in self._base_labels}
        if series.kind == "histogram":
            bounds = self.bounds(series)
            _show_counts(metric, base, bounds, values.counts[series.name], alias.bounds or bounds)
        else:
            _show_values(metric, base, series, alias, values.numbers[series.name])


def _show_values(
    metric: Metric, base: dict[str, str], series: Series, alias: Alias, values: Mapping[Labels, float]
) -> None:
    name = f"{alias.name}_total" if series.kind == "counter" else alias.name
    names = [alias.labels.get(label, label) for label in series.labels]
    for labels, value in values.items():
        shown: Iterable[str] = labels
        if alias.values is not None:
            if any(label not in alias.values for label in labels):
                continue
            shown = [alias.values[label] for label in labels]
        number = value if alias.constant is None else alias.constant
        metric.add_sample(name, base | dict(zip(names, shown, strict=True)), number)


def _show_counts(
    metric: Metric,
    base: dict[str, str],
    bounds: tuple[float, ...],
    counts: HistogramCounts,
    shown_bounds: tuple[float, ...],
) -> None:
    up_to = dict(zip(bounds, accumulate(counts.counts), strict=False))  # the last count is for values above every bound
    for bound in shown_bounds:
        metric.add_sample(f"{metric.name}_bucket", base | {"le": _le(bound)}, up_to[bound])
    metric.add_sample(f"{metric.name}_bucket", base | {"le": "+Inf"}, counts.num_values)
    metric.add_sample(f"{metric.name}_count", base, counts.num_values)
    metric.add_sample(f"{metric.name}_sum", base, counts.total)


def _le(bound: float) -> str:
    text: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
    return text
