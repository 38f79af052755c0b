"""Headrace runs LLM batch jobs and serves LLM requests with as little waste as the hardware allows.

Names are imported at first use, so that `import headrace` is fast and does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.adapters import LoRARequest
    from headrace.batching import BatcherStats, DynamicBatcher
    from headrace.config import EngineConfig
    from headrace.engine.async_engine import AsyncEngine
    from headrace.engine.beam_search import BeamSearchParams
    from headrace.engine.llm import LLM
    from headrace.engine.pooling import (
        ClassificationRequestOutput,
        PoolingParams,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from headrace.types import (
        CompletionOutput,
        EmbeddingRequestOutput,
        RequestOutput,
        SamplingParams,
        ScoreRequestOutput,
        StructuredOutputs,
        StructuredOutputsParams,
    )

__all__ = [
    "LLM",
    "AsyncEngine",
    "BatcherStats",
    "BeamSearchParams",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "DynamicBatcher",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "LoRARequest",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoreRequestOutput",
    "ScoringRequestOutput",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "__version__",
]

_MODULES = {
    "LLM": "headrace.engine.llm",
    "AsyncEngine": "headrace.engine.async_engine",
    "BatcherStats": "headrace.batching",
    "BeamSearchParams": "headrace.engine.beam_search",
    "ClassificationRequestOutput": "headrace.engine.pooling",
    "CompletionOutput": "headrace.types",
    "DynamicBatcher": "headrace.batching",
    "EngineConfig": "headrace.config",
    "LoRARequest": "headrace.adapters",
    "PoolingParams": "headrace.engine.pooling",
    "PoolingRequestOutput": "headrace.engine.pooling",
    "RequestOutput": "headrace.types",
    "ScoreRequestOutput": "headrace.types",
    "ScoringRequestOutput": "headrace.engine.pooling",
    "EmbeddingRequestOutput": "headrace.types",
    "SamplingParams": "headrace.types",
    "StructuredOutputs": "headrace.types",
    "StructuredOutputsParams": "headrace.types",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value  # later uses do not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
