"""Dynamic batching of single requests for any callable that takes a list. Independent of models and of torch."""

from __future__ import annotations

from headrace.batching.batcher import DynamicBatcher
from headrace.batching.stats import BatcherStats

__all__ = ["BatcherStats", "DynamicBatcher"]
