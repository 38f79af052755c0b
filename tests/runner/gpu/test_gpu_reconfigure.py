"""Other settings for a loaded model on a GPU: graphs are captured again, and the memory of the old ones is free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.engine.start import facts_without
from headrace.errors import ConfigError
from tests.engine.tiny import SHAPE, save_model

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1 + (7 * i + j) % (SHAPE["vocab_size"] - 1) for j in range(20 + 9 * i)] for i in range(12)]
GIB = 2**30


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 100},
        {"max_num_seqs": 24, "enable_prefix_caching": False, "enable_chunked_prefill": False, "block_size": 32},
        {"kv_cache_memory_bytes": GIB, "max_model_len": 200},
    ],
)
def test_settings_and_answers_are_those_of_a_fresh_start(tmp_path: Path, settings: dict[str, Any]) -> None:
    save_model(tmp_path)
    with LLM(str(tmp_path), max_num_seqs=8, num_gpu_blocks_override=256) as llm:
        tokens(llm)
        llm.reconfigure(**settings)
        found, answers = llm.settings, tokens(llm)
    with LLM(str(tmp_path), **settings) as fresh:
        assert found == fresh.settings
        assert answers == tokens(fresh)


def test_memory_of_the_engine_counts_as_free(tmp_path: Path) -> None:
    """So that a KV cache that is sized by memory is as large as after a fresh start. Only differences at one moment are
    compared: other tests use the same GPU."""
    save_model(tmp_path)
    with LLM(str(tmp_path), kv_cache_memory_bytes=16 * GIB, max_num_seqs=16) as llm:
        tokens(llm)
        assert torch.cuda.memory_reserved() > 15 * GIB
        assert llm._engine.model is not None
        gpu = facts_without(llm._engine.model).gpu
        assert gpu is not None
        counted = gpu.free_memory - torch.cuda.mem_get_info()[0]
        assert 15 * GIB < counted < 18 * GIB


def test_memory_does_not_grow(tmp_path: Path) -> None:
    save_model(tmp_path)
    settings: dict[str, Any] = {"max_num_seqs": 16, "kv_cache_memory_bytes": 4 * GIB}
    with LLM(str(tmp_path), **settings) as llm:
        expected = tokens(llm)
        llm.reconfigure(**settings)
        reserved = torch.cuda.memory_reserved()
        for _ in range(5):
            llm.reconfigure(**settings)
            assert tokens(llm) == expected
        assert torch.cuda.memory_reserved() < reserved + GIB // 4


def test_the_old_settings_are_restored_if_the_new_cache_does_not_fit(tmp_path: Path) -> None:
    save_model(tmp_path)
    settings: dict[str, Any] = {"max_num_seqs": 16, "kv_cache_memory_bytes": 2 * GIB}
    with LLM(str(tmp_path), **settings) as llm:
        expected, before = tokens(llm), llm.settings
        too_much = torch.cuda.get_device_properties(0).total_memory - GIB // 8  # CUDA itself needs more than the rest
        with pytest.raises(ConfigError, match="no room for"):
            llm.reconfigure(**settings | {"kv_cache_memory_bytes": too_much})
        assert llm.settings == before
        assert tokens(llm) == expected
