"""`Stores`: the values of all engines and of the server around them, exported under each name and its aliases.

    one engine        one store, and every series has the label engine="0"
    several           a store for each engine, with its label, and one for the server, without it

The server reads them as one: counters and histograms are added, gauges as their series says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from headrace.histogram import HistogramCounts
from headrace.monitor.series import Alias, OverEngines, Series
from headrace.monitor.store import Labels, Store, Values

Where = Sequence[tuple[str, tuple[str, ...]]]
_REDUCE: dict[OverEngines, Callable[[Iterable[float]], float]] = {"sum": sum, "min": min, "max": max}


class Stores(Collector):
    """Owns the stores. Reading takes their locks."""

    def __init__(self, series: Sequence[Series], model_name: str, *, num_engines: int = 1, max_model_len: int) -> None:
        self._series = series
        if num_engines == 1:
            self.server = Store(series, {"model_name": model_name, "engine": "0"}, max_model_len)
            self.engines: tuple[Store, ...] = (self.server,)
            return
        self.server = Store([one for one in series if one.scope == "server"], {"model_name": model_name}, max_model_len)
        of_engine = [one for one in series if one.scope == "engine"]
        self.engines = tuple(
            Store(of_engine, {"model_name": model_name, "engine": str(number)}, max_model_len)
            for number in range(num_engines)
        )

    def of(self, series: Series) -> tuple[Store, ...]:
        """The stores that have the series."""
        return self.engines if series.scope == "engine" else (self.server,)

    def read(self, series: Series, where: Where = ()) -> float | Sequence[int] | None:
        """The sum of a series' samples with the accepted label values, or the counts of a histogram.

        None: it is a gauge without a value.
        """
        found = [store.read(series, where) for store in self.of(series)]
        if len(found) == 1:
            return found[0]
        if series.kind == "histogram":
            return _summed([counts for counts in found if isinstance(counts, Sequence)])
        values = [value for value in found if isinstance(value, (int, float))]
        return float(_REDUCE[series.over_engines](values)) if values else None

    def copy(self) -> Values:
        """All values at this moment, as those of one engine."""
        if len(self.engines) == 1:
            return self.server.copy()
        of_server, of_engines = self.server.copy(), [store.copy() for store in self.engines]
        numbers, counts = dict(of_server.numbers), dict(of_server.counts)
        for series in self._series:
            if series.scope == "server":
                continue
            if series.kind == "histogram":
                counts[series.name] = _added(values.counts[series.name] for values in of_engines)
            else:
                numbers[series.name] = _reduced(series, [values.numbers[series.name] for values in of_engines])
        return Values(numbers, counts)

    def bounds(self, series: Series) -> tuple[float, ...]:
        return self.of(series)[0].bounds(series)

    def collect(self) -> Iterator[Metric]:
        values = {store: store.copy() for store in (self.server, *self.engines)}
        for series in self._series:
            for alias in (series.as_alias, *series.aliases):
                metric = Metric(alias.name, _help(series, alias), series.kind)
                for store in self.of(series):
                    store.show(metric, series, alias, values[store])
                yield metric


def _help(series: Series, alias: Alias) -> str:
    return series.help if alias.name == series.name else f"{series.help} Alias of {series.name}."


def _reduced(series: Series, each: Sequence[Mapping[Labels, float]]) -> dict[Labels, float]:
    reduce = _REDUCE[series.over_engines]
    labels = dict.fromkeys(labels for values in each for labels in values)
    return {one: float(reduce([values[one] for values in each if one in values])) for one in labels}


def _added(each: Iterable[HistogramCounts]) -> HistogramCounts:
    found = list(each)
    return HistogramCounts(_summed([counts.counts for counts in found]), sum(counts.total for counts in found))


def _summed(each: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*each, strict=True)))
