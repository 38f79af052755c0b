"""Greedy answers equal those of transformers, through chunks, prefix hits, preemption and mixed batches."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace import LLM, SamplingParams
from tests.engine.tiny import FAMILIES, HYBRIDS, LIKE_OTHERS, SHAPE, greedy, save_model

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
# The stop token is never sampled, but makes the length unknown, so that preemption can happen.
OPEN_ENDED = dataclasses.replace(GREEDY, stop_token_ids=(10**6,))
pytestmark = pytest.mark.parity


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Tiny GEMMs finish before a second thread wakes up."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def prompts_with_a_shared_prefix() -> list[list[int]]:
    """Lengths around block borders; half share a prefix of 40 tokens."""
    rng = random.Random(3)
    head = [rng.randrange(1, SHAPE["vocab_size"]) for _ in range(40)]
    tails = [
        [rng.randrange(1, SHAPE["vocab_size"]) for _ in range(n)] for n in (1, 7, 8, 9, 24, 25, 60, 3, 16, 17, 32, 1)
    ]
    return [head + tail if i % 2 else tail for i, tail in enumerate(tails)]


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow) if name in LIKE_OTHERS else name for name in FAMILIES]
)
def test_greedy_tokens_equal_transformers_through_chunks_prefix_hits_and_mixed_batches(
    family: str, tmp_path: Path
) -> None:
    model = save_model(tmp_path, family)
    prompts = prompts_with_a_shared_prefix()
    expected = [greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 11, "num_gpu_blocks_override": 60, "block_size": 8}
    with LLM(str(tmp_path), num_threads=1, **settings) as llm:
        first = llm.generate(prompts, GREEDY, use_tqdm=False)
        again = llm.generate(prompts, GREEDY, use_tqdm=False)
        stats = llm.stats.scheduler
    assert [list(output.outputs[0].token_ids) for output in first] == expected
    assert [list(output.outputs[0].token_ids) for output in again] == expected
    assert (stats.num_prefix_hit_tokens > 0) == (family not in HYBRIDS)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "lfm2"))
        for name in ("gpt_oss", "deepseek_v2", "deepseek_v3", "bloom", *HYBRIDS)
    ],
)
def test_preempted_sequences_of_families_with_another_attention_get_the_same_tokens(
    family: str, tmp_path: Path
) -> None:
    model = save_model(tmp_path, family)
    prompts = prompts_with_a_shared_prefix()
    expected = [greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    with LLM(str(tmp_path), max_num_seqs=6, num_gpu_blocks_override=14, block_size=8, max_model_len=112) as llm:
        outputs = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, OPEN_ENDED, use_tqdm=False)]
        assert llm.stats.scheduler.num_preemptions > 0
    assert outputs == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"num_gpu_blocks_override": 14, "block_size": 8, "max_model_len": 112},  # too small for all prompts: preemption
        {
            "num_gpu_blocks_override": 14,
            "block_size": 8,
            "max_model_len": 112,
            "capacity_policy": "guaranteed_no_evict",
        },
        {"enable_chunked_prefill": False, "max_model_len": 128},
        {"enable_prefix_caching": False},
        {"block_size": 32},
    ],
    ids=["preemption", "no-evict", "whole-prompts", "no-prefix-cache", "larger-blocks"],
)
def test_settings_change_the_schedule_and_never_the_answer(settings: dict[str, object], tiny_directory: Path) -> None:
    prompts = prompts_with_a_shared_prefix()
    with LLM(str(tiny_directory), max_num_seqs=6) as plain:
        expected = [o.outputs[0].token_ids for o in plain.generate(prompts, GREEDY, use_tqdm=False)]
    with LLM(str(tiny_directory), max_num_seqs=6, **settings) as llm:
        outputs = [o.outputs[0].token_ids for o in llm.generate(prompts, OPEN_ENDED, use_tqdm=False)]
        preemptions = llm.stats.scheduler.num_preemptions
    assert outputs == expected
    if settings.get("capacity_policy") == "guaranteed_no_evict":
        assert preemptions == 0
    elif "max_model_len" in settings and settings.get("num_gpu_blocks_override"):
        assert preemptions > 0
