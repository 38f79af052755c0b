"""Greedy tokens and their log-probabilities equal those of transformers, however the scheduler runs them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from headrace import LLM, SamplingParams
from tests.engine.tiny import FAMILIES, HYBRIDS, LIKE_OTHERS, SHAPE, greedy, save_model

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
# The stop token is never sampled, but makes the length unknown, so that preemption can happen.
OPEN_ENDED = dataclasses.replace(GREEDY, stop_token_ids=(10**6,), logprobs=0)
LOGPROB_ERROR = 3e-4  # in float32
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
def test_greedy_tokens_and_their_log_probabilities_equal_transformers(family: str, tmp_path: Path) -> None:
    """Through chunks, mixed batches, prefix hits and, since the blocks are too few for four sequences, preemption."""
    model = save_model(tmp_path, family)
    prompts = prompts_with_a_shared_prefix()
    expected = [greedy_with_logprobs(model, prompt) for prompt in prompts]
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 11, "num_gpu_blocks_override": 16, "block_size": 8}
    with LLM(str(tmp_path), num_threads=1, max_model_len=112, **settings) as llm:
        answers = [llm.generate(prompts, OPEN_ENDED, use_tqdm=False) for _ in range(2)]
        stats = llm.stats.scheduler
    for outputs in answers:
        for output, (tokens, logprobs) in zip(outputs, expected, strict=True):
            (answer,) = output.outputs
            assert list(answer.token_ids) == tokens
            assert answer.logprobs is not None
            assert [entry.logprob for entry in answer.logprobs] == pytest.approx(logprobs, abs=LOGPROB_ERROR)
    assert stats.num_preemptions > 0
    assert (stats.num_prefix_hit_tokens > 0) == (family not in HYBRIDS)


def greedy_with_logprobs(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Decodes greedily without a cache, and returns the log-probability of each token too."""
    tokens = greedy(model, prompt, NUM_TOKENS)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return tokens, chosen.tolist()


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
