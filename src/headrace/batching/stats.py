"""Counters of a batcher."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class BatcherStats:
    """Counters since the start, and current gauges. Owned by the batcher; readers get a copy.

    A wait lasts from an item's submission to the start of its batch.
    """

    num_batches: int = 0  # started
    num_items: int = 0  # in them
    num_tokens: int = 0  # of these items
    num_failed_batches: int = 0  # the callable raised, or gave a wrong number of results
    num_refused: int = 0  # too large, queue full, or closed
    num_cancelled: int = 0  # while they waited
    sum_wait_seconds: float = 0.0
    longest_wait_seconds: float = 0.0
    num_waiting: int = 0  # items, now
    num_running: int = 0  # batches, now

    @property
    def mean_batch_size(self) -> float:
        return self.num_items / max(1, self.num_batches)

    @property
    def mean_batch_tokens(self) -> float:
        return self.num_tokens / max(1, self.num_batches)

    @property
    def mean_wait_ms(self) -> float:
        return 1000 * self.sum_wait_seconds / max(1, self.num_items)
