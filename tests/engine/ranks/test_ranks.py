"""Engines on two and more ranks, in real processes: whatever a request asks for, the answer is that of one process."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.engine.reconfigure import OtherWeightsError
from headrace.types import StructuredOutputs
from tests.engine import tiny

pytestmark = pytest.mark.processes

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = ["The river", "The river and the mill", "abc " * 30, "x"]
SMALL: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "max_num_seqs": 8, "num_gpu_blocks_override": 128}


@contextmanager
def running(model: Path, **settings: Any) -> Iterator[LLM]:
    llm = LLM(str(model), **SMALL | settings)
    try:
        yield llm
    finally:
        llm.close()


@pytest.fixture(scope="module")
def one(tiny_directory: Path) -> Iterator[LLM]:
    with running(tiny_directory) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(tiny_directory: Path) -> Iterator[LLM]:
    with running(tiny_directory, tensor_parallel_size=2) as llm:
        yield llm


def tokens(llm: LLM, params: SamplingParams, prompts: list[str] | None = None) -> list[list[tuple[int, ...]]]:
    outputs = llm.generate(prompts or PROMPTS, params, use_tqdm=False)
    return [[tuple(answer.token_ids) for answer in output.outputs] for output in outputs]


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.9, seed=7, max_tokens=24, n=2, top_k=40, top_p=0.9, min_p=0.01),
        SamplingParams(temperature=0.8, seed=3, max_tokens=24, repetition_penalty=1.3, frequency_penalty=0.5),
        SamplingParams(temperature=0.0, max_tokens=24, logit_bias={7: 4.0, 300: 5.0}, presence_penalty=1.0),
        SamplingParams(temperature=0.0, max_tokens=8, allowed_token_ids=[5, 6, 310]),
        SamplingParams(temperature=0.0, max_tokens=8, bad_words=["e", "a"], min_tokens=4),
        SamplingParams(temperature=0.0, max_tokens=16, structured_outputs=StructuredOutputs(regex="[a-f]{3,9}!")),
    ],
    ids=["greedy", "filters and n", "penalties", "bias", "allowed tokens", "bad words", "grammar"],
)
def test_two_ranks_sample_the_tokens_of_one_process(one: LLM, two: LLM, params: SamplingParams) -> None:
    assert tokens(two, params) == tokens(one, params)


def test_two_ranks_return_the_log_probabilities_of_one_process(one: LLM, two: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    for ours, theirs in zip(two.generate(PROMPTS, params), one.generate(PROMPTS, params), strict=True):
        assert_close(ours.outputs[0].logprobs, theirs.outputs[0].logprobs)
        assert_close(ours.prompt_logprobs, theirs.prompt_logprobs)


def assert_close(ours: Any, theirs: Any) -> None:
    for a, b in zip(ours, theirs, strict=True):
        if a is None or b is None:
            assert a is b  # the first token of a prompt
            continue
        assert (a.token_id, a.rank, a.top_token_ids) == (b.token_id, b.rank, b.top_token_ids)
        np.testing.assert_allclose([a.logprob, *a.top_logprobs], [b.logprob, *b.top_logprobs], atol=1e-4)


def test_two_ranks_compute_the_embeddings_and_scores_of_one_process(one: LLM, two: LLM) -> None:
    ours, theirs = (np.stack([each.embedding for each in llm.embed(PROMPTS)]) for llm in (two, one))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    ours, theirs = (
        np.array([each.outputs.logprob for each in llm.score("The ", ["river", "mill"])]) for llm in (two, one)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_each_rank_has_its_own_kv_heads_and_the_blocks_are_those_of_one_process(one: LLM, two: LLM) -> None:
    assert two.settings.tensor_parallel_size == 2
    assert two.settings.num_blocks == one.settings.num_blocks
    assert two.spec.num_kv_heads == one.spec.num_kv_heads  # of the model, not of the rank
    assert any("tensor_parallel_size=2" in warning for warning in two.settings.warnings)


def test_other_settings_need_a_new_engine(two: LLM) -> None:
    with pytest.raises(OtherWeightsError, match="tensor_parallel_size=2 keeps its settings"):
        two.reconfigure(max_num_seqs=4)
    assert tokens(two, GREEDY)  # it still runs


def test_closing_the_engine_ends_the_ranks(tiny_directory: Path) -> None:
    with running(tiny_directory, tensor_parallel_size=2) as llm:
        (pid,) = rank_pids(llm)
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_ranks_do_not_need_shared_memory(two: LLM) -> None:
    """A full /dev/shm, as in a container with its default of 64 MiB, is no problem."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    (pid,) = rank_pids(two)
    mapped = re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{pid}/maps").read_text())
    assert [name for name in mapped if "KMP" not in name and "sem." not in name] == []  # Intel's OpenMP has a page


def rank_pids(llm: LLM) -> list[int]:
    runner: Any = llm._engine.client._core.runner  # type: ignore[attr-defined]
    pids: list[int] = runner._ranks.pids
    return pids


# Logits of every family on two, three and four ranks are compared in tests/models/test_sharded_decoder.py.
ON_FOUR_RANKS = ("llama", "gemma2", "qwen3_moe", "deepseek_v3", "gpt_oss", "falcon", "bloom")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "size"), [*((family, 2) for family in tiny.DIVIDED), *((family, 4) for family in ON_FOUR_RANKS)]
)
def test_every_family_answers_on_several_ranks_as_in_one_process(family: str, size: int, tmp_path: Path) -> None:
    """Six query heads and two KV heads: four ranks have two query heads, or one, and share KV heads."""
    tiny.save_model(tmp_path, family)
    with running(tmp_path) as llm:
        expected = tokens(llm, GREEDY)
    with running(tmp_path, tensor_parallel_size=size) as llm:
        assert tokens(llm, GREEDY) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"num_gpu_blocks_override": 20, "max_num_seqs": 6},  # sequences are preempted
        {"max_num_batched_tokens": 16},  # prompts are chunked
        {"enable_prefix_caching": False},
        {"block_size": 32, "capacity_policy": "guaranteed_no_evict"},
    ],
    ids=["preemption", "chunked prefill", "no prefix caching", "other policy"],
)
def test_preemption_chunks_and_prefixes_do_not_change_the_answers_on_ranks(
    tiny_directory: Path, one: LLM, settings: dict[str, Any]
) -> None:
    prompts = [f"{'a common prefix ' * 4}{number}" for number in range(12)] + PROMPTS
    # With a stop token the length of an answer is not known in advance, so that too many sequences may start.
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=40, ignore_eos=True, stop_token_ids=[319])
    expected = tokens(one, params, prompts)
    with running(tiny_directory, tensor_parallel_size=2, **settings) as llm:
        assert tokens(llm, params, prompts) == expected
        assert tokens(llm, params, prompts) == expected  # with a warm prefix cache
        if "num_gpu_blocks_override" in settings:
            assert llm.stats.scheduler.num_preemptions > 0


@pytest.mark.slow
@pytest.mark.embedded
def test_the_embedded_model_with_its_uneven_heads_answers_as_in_one_process() -> None:
    """Nine query heads and three KV heads over two ranks, read from a quantized GGUF file."""
    answers = []
    for size in (1, 2):
        llm = LLM(tensor_parallel_size=size, device="cpu", max_model_len=512, max_num_seqs=4)
        (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=12))
        answers.append(output.outputs[0].text)
        llm.close()
    assert answers[0] == answers[1] and "Paris" in answers[0]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_each_rank_keeps_its_own_part_of_evicted_prefixes(sizes: dict[str, int], tiny_directory: Path) -> None:
    rounds = [[f"{name} " * 30 + str(number) for name in ("abc", "def", "ghi", "jkl")] for number in range(3)]
    with running(tiny_directory) as llm:
        wanted = [tokens(llm, GREEDY, prompts) for prompts in rounds]
    small = {"num_gpu_blocks_override": 20, "max_num_seqs": 2, "kv_offload_gib": 0.01}
    with running(tiny_directory, **sizes, **small) as llm:
        assert [tokens(llm, GREEDY, prompts) for prompts in rounds] == wanted
        assert llm.stats.scheduler.num_tier_hit_tokens > 0
