"""Ranks on GPUs: one GPU each over NCCL, with the collectives in CUDA graphs; and two that share one, over Gloo. Small
sums go through shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.engine.resolve import SHARE_GPUS_VARIABLE
from tests.engine import tiny

pytestmark = pytest.mark.gpu

PROMPTS = ["The river", "The river and the mill", "abc " * 30, "x"]
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
    "all features": SamplingParams(temperature=0.0, max_tokens=16, logit_bias={7: 4.0}, logprobs=2, ignore_eos=True),
}
FAMILIES = ("llama", "qwen3", "mixtral", "olmo2", "gemma2")


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tiny.save_model(tmp_path, request.param)
    return tmp_path


def answers(model: Path, size: int, **settings: Any) -> list[list[tuple[int, ...]]]:
    settings = {"dtype": "bfloat16", "max_num_seqs": 16, "gpu_memory_utilization": 0.2} | settings
    llm = LLM(str(model), tensor_parallel_size=size, **settings)
    try:
        if size > 1:
            assert has_peer_sums(llm) != settings.get("disable_custom_all_reduce", False)
        return [
            [tuple(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]
            for params in PARAMS.values()
        ]
    finally:
        llm.close()


def has_peer_sums(llm: LLM) -> bool:
    group = llm._engine.client._core.runner._own._decoder.group  # type: ignore[attr-defined]
    return group._small_sums is not None


def share_of_equal_first_tokens(ours: list[list[tuple[int, ...]]], theirs: list[list[tuple[int, ...]]]) -> float:
    """Sums in bfloat16 are rounded in another order, so a near-tie may fall the other way, and all tokens after it."""
    pairs = [(a[:4], b[:4]) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


@pytest.fixture
def shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARE_GPUS_VARIABLE, "1")


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="make gpu-test-multi gives each rank a GPU")
def test_two_ranks_that_share_a_gpu_answer_as_one_process(model: Path, shared_gpu: None) -> None:
    assert share_of_equal_first_tokens(answers(model, 2), answers(model, 1)) >= 0.75


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_small_sums_can_be_left_to_the_process_group(model: Path, shared_gpu: None) -> None:
    without = answers(model, 2, disable_custom_all_reduce=True)
    assert share_of_equal_first_tokens(without, answers(model, 2)) >= 0.75


@pytest.mark.multi_gpu
def test_two_ranks_with_a_gpu_each_answer_as_one_process(model: Path) -> None:
    assert share_of_equal_first_tokens(answers(model, 2), answers(model, 1)) >= 0.75


@pytest.mark.multi_gpu
def test_steps_are_replayed_as_graphs_with_the_collectives_inside(model: Path) -> None:
    llm = LLM(str(model), tensor_parallel_size=2, max_num_seqs=16, gpu_memory_utilization=0.2)
    try:
        graphs = llm._engine.client._core.runner._own._decode_graphs  # type: ignore[attr-defined]
        assert isinstance(graphs.fitting(4, is_sharing=False).model, torch.cuda.CUDAGraph)
    finally:
        llm.close()
