"""Dynamic batching of single requests for any callable that takes a list. Knows nothing of models, and no torch."""

from __future__ import annotations

from headrace.batching.batcher import DynamicBatcher
from headrace.batching.stats import BatcherStats

__all__ = ["BatcherStats", "DynamicBatcher"]
