from __future__ import annotations

import pytest

from headrace.engine.settings import Settings


@pytest.fixture
def settings() -> Settings:
    return Settings(
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        load_format="auto",
        num_threads=1,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=16,
        num_blocks=100,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        queue_policy="fcfs",
        capacity_policy="max_utilization",
        seed=0,
        choices=(),
    )
