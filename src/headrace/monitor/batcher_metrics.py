"""The metrics page of a `DynamicBatcher`: queue length, batch sizes, waiting times and padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Literal

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from headrace.batching.stats import BATCH_SIZE_BOUNDS, WAIT_SECONDS_BOUNDS, BatcherStats
from headrace.histogram import HistogramCounts

Kind = Literal["counter", "gauge"]

SERIES: tuple[tuple[str, Kind, str, Callable[[BatcherStats], float]], ...] = (
    ("queue_length", "gauge", "Items that wait for a batch.", lambda s: s.num_waiting),
    ("batches_running", "gauge", "Batches that the callable works on.", lambda s: s.num_running),
    ("batches", "counter", "Batches started.", lambda s: s.num_batches),
    ("items", "counter", "Items in them.", lambda s: s.num_items),
    ("tokens", "counter", "Tokens of these items.", lambda s: s.num_tokens),
    (
        "padding_tokens",
        "counter",
        "Tokens of padding, if a callable pads the items of a batch to its longest one.",
        lambda s: s.num_padding_tokens,
    ),
    ("failed_batches", "counter", "Batches for which the callable raised.", lambda s: s.num_failed_batches),
    ("refused", "counter", "Items refused: too large, queue full, or closed.", lambda s: s.num_refused),
    ("cancelled", "counter", "Items cancelled while they waited.", lambda s: s.num_cancelled),
)
HISTOGRAMS: tuple[tuple[str, str, tuple[float, ...], Callable[[BatcherStats], HistogramCounts]], ...] = (
    ("batch_size", "Items in a batch.", BATCH_SIZE_BOUNDS, lambda s: s.batch_sizes),
    (
        "wait_seconds",
        "From the submission of an item to the start of its batch.",
        WAIT_SECONDS_BOUNDS,
        lambda s: s.waits,
    ),
)


class BatcherMetrics(Collector):
    """Reads the counters at a scrape; the batcher counts anyway."""

    def __init__(self, read: Callable[[], BatcherStats]) -> None:
        self._read = read
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self) -> tuple[bytes, str]:
        """The page and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def collect(self) -> Iterator[Metric]:
        stats = self._read()
        for name, kind, help, read in SERIES:
            metric = Metric(f"headrace:batcher_{name}", help, kind)
            metric.add_sample(f"{metric.name}{'_total' if kind == 'counter' else ''}", {}, read(stats))
            yield metric
        for name, help, bounds, counts in HISTOGRAMS:
            metric = Metric(f"headrace:batcher_{name}", help, "histogram")
            _show(metric, bounds, counts(stats))
            yield metric


def _show(metric: Metric, bounds: tuple[float, ...], counts: HistogramCounts) -> None:
    up_to = list(accumulate(counts.counts or (0,) * (len(bounds) + 1)))
    for bound, count in zip((*bounds, float("inf")), up_to, strict=True):
        metric.add_sample(f"{metric.name}_bucket", {"le": floatToGoString(bound)}, count)  # type: ignore[no-untyped-call]
    metric.add_sample(f"{metric.name}_count", {}, up_to[-1])
    metric.add_sample(f"{metric.name}_sum", {}, counts.total)
