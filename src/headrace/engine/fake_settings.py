"""Settings for an engine without a model (`runner.fake`): for tests, and for measuring the host's cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.engine.settings import Settings

_SMALL = Settings(
    device="cpu",
    dtype="float32",
    kv_dtype="float32",
    load_format="random",
    num_threads=1,
    max_model_len=512,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    block_size=16,
    num_blocks=64,
    enable_chunked_prefill=True,
    enable_prefix_caching=True,
    queue_policy="fcfs",
    capacity_policy="max_utilization",
    seed=0,
    choices=(),
)


def fake_settings(**changes: Any) -> Settings:
    """Small settings, with these changes."""
    return replace(_SMALL, **changes)
