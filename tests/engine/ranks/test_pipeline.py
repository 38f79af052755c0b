"""Pipelines of two and more stages, in real processes: whatever a request asks for, the answer is that of one
process."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.engine.ranks.ranks_runner import PipelineRunner
from headrace.errors import ConfigError
from headrace.types import StructuredOutputs
from tests.engine import tiny
from tests.engine.ranks.test_failures import failure_during, has_gone, ranks_of
from tests.engine.ranks.test_ranks import GREEDY, PROMPTS, assert_close, running, tokens

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def one(tiny_directory: Path) -> Iterator[LLM]:
    with running(tiny_directory) as llm:
        yield llm


@pytest.fixture(scope="module")
def stages(tiny_directory: Path) -> Iterator[LLM]:
    with running(tiny_directory, pipeline_parallel_size=2) as llm:
        yield llm


def runner_of(llm: LLM) -> PipelineRunner:
    runner: Any = llm._engine.client._core.runner  # type: ignore[attr-defined]
    assert isinstance(runner, PipelineRunner)
    return runner


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.9, seed=7, max_tokens=24, n=2, top_k=40, top_p=0.9, min_p=0.01),
        SamplingParams(temperature=0.8, seed=3, max_tokens=24, repetition_penalty=1.3, frequency_penalty=0.5),
        SamplingParams(temperature=0.0, max_tokens=8, bad_words=["e", "a"], min_tokens=4),
        SamplingParams(temperature=0.0, max_tokens=16, structured_outputs=StructuredOutputs(regex="[a-f]{3,9}!")),
    ],
    ids=["greedy", "filters and n", "penalties", "bad words", "grammar"],
)
def test_two_stages_sample_the_tokens_of_one_process(one: LLM, stages: LLM, params: SamplingParams) -> None:
    assert tokens(stages, params) == tokens(one, params)


def test_two_stages_return_log_probabilities_embeddings_and_scores_of_one_process(one: LLM, stages: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    for ours, theirs in zip(stages.generate(PROMPTS, params), one.generate(PROMPTS, params), strict=True):
        assert_close(ours.outputs[0].logprobs, theirs.outputs[0].logprobs)
        assert_close(ours.prompt_logprobs, theirs.prompt_logprobs)
    ours, theirs = (np.stack([each.embedding for each in llm.embed(PROMPTS)]) for llm in (stages, one))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    ours, theirs = (
        np.array([each.outputs.logprob for each in llm.score("The ", ["river", "mill"])]) for llm in (stages, one)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_every_stage_has_a_micro_batch(stages: LLM) -> None:
    stages.generate(PROMPTS, GREEDY, use_tqdm=False)
    runner = runner_of(stages)
    assert runner.max_in_flight >= 2
    # With four sequences in two groups, hardly a step is submitted into an empty pipeline.
    assert runner.num_overlapping_steps > 0.8 * runner.num_steps


@pytest.mark.slow
def test_a_stage_that_is_killed_ends_the_engine_with_its_name(tiny_directory: Path) -> None:
    with running(tiny_directory, pipeline_parallel_size=2, max_model_len=512) as llm:
        (rank,) = ranks_of(os.getpid())[-1:]
        assert re.search(rf"rank 1 of 2 \(process {rank.pid}\).*SIGKILL", failure_during(rank.kill, llm))
    assert has_gone(rank)


def test_more_stages_than_layers_are_refused_with_the_numbers(tiny_directory: Path) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size=4 is more than the 3 layers"):
        LLM(str(tiny_directory), device="cpu", pipeline_parallel_size=4)


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny.DIVIDED)
def test_every_family_answers_in_a_pipeline_as_in_one_process(family: str, tmp_path: Path) -> None:
    tiny.save_model(tmp_path, family)
    with running(tmp_path) as llm:
        expected = tokens(llm, GREEDY)
    with running(tmp_path, pipeline_parallel_size=2) as llm:
        assert tokens(llm, GREEDY) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"pipeline_parallel_size": 3},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2, "num_gpu_blocks_override": 20, "max_num_seqs": 8},  # sequences are preempted
        {"pipeline_parallel_size": 2, "max_num_batched_tokens": 16},  # prompts are chunked
        {"pipeline_parallel_size": 2, "enable_chunked_prefill": False},
        {"pipeline_parallel_size": 2, "enable_prefix_caching": False},
    ],
    ids=["three stages", "two by two", "preemption", "chunked prefill", "whole prompts", "no prefix caching"],
)
def test_stages_preemption_chunks_and_prefixes_do_not_change_the_answers(
    tiny_directory: Path, one: LLM, sizes: dict[str, Any]
) -> None:
    prompts = [f"{'a common prefix ' * 4}{number}" for number in range(12)] + PROMPTS
    # With a stop token the length of an answer is not known in advance, so that too many sequences may start.
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=40, ignore_eos=True, stop_token_ids=[319])
    expected = tokens(one, params, prompts)
    with running(tiny_directory, **sizes) as llm:
        assert tokens(llm, params, prompts) == expected
        assert tokens(llm, params, prompts) == expected  # with a warm prefix cache
        if "num_gpu_blocks_override" in sizes:
            assert llm.stats.scheduler.num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["llama4", "mixtral", "qwen3_moe"])
def test_every_mixture_answers_with_whole_experts_on_ranks_as_in_one_process(
    family: str, size: int, tmp_path: Path
) -> None:
    tiny.save_model(tmp_path, family)
    with running(tmp_path) as llm:
        expected = tokens(llm, GREEDY)
    with running(tmp_path, tensor_parallel_size=size, enable_expert_parallel=True) as llm:
        assert tokens(llm, GREEDY) == expected
