"""Ranks on GPUs: one GPU each over NCCL, and two that share one, over Gloo. Small sums go through shared memory. CUDA
graphs hold the collectives, except those over Gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.engine import speculating
from headrace.engine.rank_layout import SHARE_GPUS_VARIABLE
from headrace.types import StructuredOutputs
from tests.engine import tiny

pytestmark = pytest.mark.gpu

# The sizes are set, so that no free memory is asked for: other tests use the GPU at the same time.
SMALL: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "num_gpu_blocks_override": 400,
}
PROMPTS = ["The river", "The river and the mill", "abc " * 30, "x"]  # one is chunked
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
    "all features": SamplingParams(temperature=0.0, max_tokens=16, logit_bias={7: 4.0}, logprobs=2, ignore_eos=True),
    "grammar": SamplingParams(temperature=0.0, max_tokens=16, structured_outputs=StructuredOutputs(regex="[a-f]{9}")),
}
FAMILIES = ("llama", "qwen3", "mixtral", "olmo2", "gemma2")
LAYOUTS: dict[str, dict[str, Any]] = {
    "two tensor ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
}
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "early_exit": {"method": "early_exit", "num_layers": 2},
    "draft_model": {"method": "draft_model"},
}
Answers = list[list[tuple[int, ...]]]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tiny.save_model(tmp_path, request.param)
    return tmp_path


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> dict[str, Any]:
    return LAYOUTS[request.param]


def answers(model: Path, **layout: Any) -> Answers:
    with LLM(str(model), **SMALL | layout) as llm:
        if layout.get("tensor_parallel_size", 1) > 1:
            assert has_peer_sums(llm) != layout.get("disable_custom_all_reduce", False)
        found = [
            [tuple(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]
            for params in PARAMS.values()
        ]
        found.append(found[0] if not layout else _again(llm))
        assert (llm.stats.scheduler.num_draft_tokens > 0) == ("speculative_config" in layout)
        return found


def has_peer_sums(llm: LLM) -> bool:
    group = llm._engine.client._core.runner._own._decoder.group  # type: ignore[attr-defined]
    return group._small_sums is not None


def _again(llm: LLM) -> list[tuple[int, ...]]:
    """The greedy answers with a warm prefix cache."""
    outputs = llm.generate(PROMPTS, PARAMS["greedy"], use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def share_of_equal_first_tokens(ours: Answers, theirs: Answers) -> float:
    """Sums in bfloat16 are rounded in another order, so a near-tie may fall the other way, and all tokens after it."""
    pairs = [(a[:4], b[:4]) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


@pytest.fixture
def shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARE_GPUS_VARIABLE, "1")


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="make gpu-test-multi gives each rank a GPU")
def test_two_ranks_that_share_a_gpu_answer_as_one_process(
    model: Path, layout: dict[str, Any], shared_gpu: None
) -> None:
    assert share_of_equal_first_tokens(answers(model, **layout), answers(model)) >= 0.75


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="make gpu-test-multi gives each rank a GPU")
@pytest.mark.parametrize("model", ["mixtral"], indirect=True)
def test_two_ranks_that_share_a_gpu_may_have_whole_experts(model: Path, shared_gpu: None) -> None:
    ours = answers(model, tensor_parallel_size=2, enable_expert_parallel=True)
    assert share_of_equal_first_tokens(ours, answers(model)) >= 0.75


@pytest.mark.multi_gpu
@pytest.mark.parametrize("model", ["mixtral"], indirect=True)
def test_two_ranks_with_a_gpu_each_may_have_whole_experts(model: Path) -> None:
    ours = answers(model, tensor_parallel_size=2, enable_expert_parallel=True)
    assert share_of_equal_first_tokens(ours, answers(model)) >= 0.75


def answers_with_drafts(model: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Of two tensor ranks; a tiny model drafts whatever the acceptance is."""
    monkeypatch.setattr(speculating, "GPU_FREE_ROWS", 1e9)
    monkeypatch.setattr(speculating, "_draft_cost", lambda *_: 0.0)
    monkeypatch.setattr(speculating, "_wait_cost", lambda *_: 0.0)
    config = METHODS[method] | ({"model": str(model)} if method == "draft_model" else {})
    return answers(model, tensor_parallel_size=2, speculative_config=config)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_that_share_a_gpu_answer_with_drafts_as_one_process_without(
    model: Path, method: str, shared_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert share_of_equal_first_tokens(answers_with_drafts(model, method, monkeypatch), answers(model)) >= 0.75


@pytest.mark.multi_gpu
@pytest.mark.parametrize("model", ["llama"], indirect=True)
@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_with_a_gpu_each_answer_with_drafts_as_one_process_without(
    model: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert share_of_equal_first_tokens(answers_with_drafts(model, method, monkeypatch), answers(model)) >= 0.75


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="make gpu-test-multi gives each rank a GPU")
def test_stages_that_share_a_gpu_replay_graphs_and_return_the_log_probabilities_of_one_process(
    tmp_path: Path, shared_gpu: None
) -> None:
    tiny.save_model(tmp_path, "llama")
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=1, prompt_logprobs=1)
    with LLM(str(tmp_path), **SMALL) as llm:
        (expected,) = llm.generate(PROMPTS[2], params, use_tqdm=False)
    with LLM(str(tmp_path), pipeline_parallel_size=2, **SMALL) as llm:
        (found,) = llm.generate(PROMPTS[2], params, use_tqdm=False)
        graphs = llm._engine.client._core.runner._own._decode_graphs  # type: ignore[attr-defined]
        assert isinstance(graphs.fitting(1, is_sharing=False).model, torch.cuda.CUDAGraph)
    assert found.prompt_logprobs is not None and expected.prompt_logprobs is not None
    # A stage adds in the same order as one process: what is rounded on the way is the same too.
    for ours, theirs in zip(found.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert ours is not None and theirs is not None
        assert ours.logprob == pytest.approx(theirs.logprob, abs=0.05)
    assert found.outputs[0].token_ids[0] == expected.outputs[0].token_ids[0]


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_graphs_hold_sums_through_shared_memory(model: Path, shared_gpu: None) -> None:
    """All sums and gathered logits of a tiny model are small. Over the process group, no graph can hold them."""
    for is_disabled in (False, True):
        with LLM(str(model), tensor_parallel_size=2, disable_custom_all_reduce=is_disabled, **SMALL) as llm:
            graphs = llm._engine.client._core.runner._own._decode_graphs  # type: ignore[attr-defined]
            is_graph = isinstance(graphs.fitting(4, is_sharing=False).model, torch.cuda.CUDAGraph)
            assert is_graph != is_disabled


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_small_sums_can_be_left_to_the_process_group(model: Path, shared_gpu: None) -> None:
    without = answers(model, tensor_parallel_size=2, disable_custom_all_reduce=True)
    assert share_of_equal_first_tokens(without, answers(model, tensor_parallel_size=2)) >= 0.75


@pytest.mark.multi_gpu
def test_two_ranks_with_a_gpu_each_answer_as_one_process(model: Path, layout: dict[str, Any]) -> None:
    assert share_of_equal_first_tokens(answers(model, **layout), answers(model)) >= 0.75


@pytest.mark.multi_gpu
def test_steps_are_replayed_as_graphs_with_the_collectives_inside(model: Path) -> None:
    with LLM(str(model), tensor_parallel_size=2, **SMALL) as llm:
        graphs = llm._engine.client._core.runner._own._decode_graphs  # type: ignore[attr-defined]
        assert isinstance(graphs.fitting(4, is_sharing=False).model, torch.cuda.CUDAGraph)
