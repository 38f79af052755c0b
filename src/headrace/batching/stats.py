"""Counters of a batcher."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.histogram import HistogramCounts

BATCH_SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
WAIT_SECONDS_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class BatcherStats:
    """Counters since the start, and current gauges. Owned by the batcher; readers get a copy.

    A wait lasts from an item's submission to the start of its batch.
    """

    num_batches: int = 0  # started
    num_items: int = 0  # in them
    num_tokens: int = 0  # of these items
    num_padding_tokens: int = 0  # if the items of a batch are padded to its longest one
    num_failed_batches: int = 0  # the callable raised, or gave a wrong number of results
    num_refused: int = 0  # too large, queue full, or closed
    num_cancelled: int = 0  # while they waited
    sum_wait_seconds: float = 0.0
    longest_wait_seconds: float = 0.0
    num_waiting: int = 0  # items, now
    num_running: int = 0  # batches, now
    batch_sizes: HistogramCounts = field(default_factory=HistogramCounts)  # by BATCH_SIZE_BOUNDS
    waits: HistogramCounts = field(default_factory=HistogramCounts)  # of items, by WAIT_SECONDS_BOUNDS

    @property
    def mean_batch_size(self) -> float:
        return self.num_items / max(1, self.num_batches)

    @property
    def mean_batch_tokens(self) -> float:
        return self.num_tokens / max(1, self.num_batches)

    @property
    def padding_share(self) -> float:
        """Share of the tokens of padded batches that are padding: what a callable that pads wastes."""
        return self.num_padding_tokens / max(1, self.num_tokens + self.num_padding_tokens)

    @property
    def mean_wait_ms(self) -> float:
        return 1000 * self.sum_wait_seconds / max(1, self.num_items)
