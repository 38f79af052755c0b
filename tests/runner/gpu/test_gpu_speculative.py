"""Speculative decoding on a GPU: answers as without drafts, up to near-ties that another batch size decides."""

from __future__ import annotations

import importlib.util
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, RequestOutput, SamplingParams, StructuredOutputs
from headrace.engine import speculating
from tests.engine.tiny import save_model
from tests.runner.gpu.judge import rounded, shortfalls

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "max_num_batched_tokens": 64, "num_gpu_blocks_override": 300}
HAS_GRAMMARS = importlib.util.find_spec("llguidance") is not None
REGEX = "(ab|cd){20}[xyz]{3}"
GREEDY = {"temperature": 0, "ignore_eos": True}
PARAMS: list[dict[str, Any]] = [
    GREEDY,
    {"seed": 3, "top_p": 0.9, "ignore_eos": True},
    {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 2, "ignore_eos": True},
    {"seed": 4, "structured_outputs": StructuredOutputs(regex=REGEX)} if HAS_GRAMMARS else GREEDY,
    GREEDY | {"stop_token_ids": list(range(5, 20)), "min_tokens": 6},
]
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4},
    "early_exit": {"method": "early_exit", "num_layers": 2},
    "draft_model": {"method": "draft_model"},
}


@pytest.fixture(autouse=True)
def _drafts_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model drafts whatever the acceptance is."""
    monkeypatch.setattr(speculating, "GPU_FREE_ROWS", 1e9)
    monkeypatch.setattr(speculating, "_draft_cost", lambda *_: 0.0)
    monkeypatch.setattr(speculating, "_wait_cost", lambda *_: 0.0)


def prompts(num: int) -> list[list[int]]:
    """With words that occur several times; some longer than a step."""
    rng = random.Random(4)
    words = [[rng.randrange(1, 95) for _ in range(4)] for _ in range(3)]
    return [[token for _ in range(3 + 5 * (i % 6)) for token in rng.choice(words)] for i in range(num)]


def answers(llm: LLM, num: int = 30) -> list[RequestOutput]:
    params = [SamplingParams(**{"max_tokens": 60, **PARAMS[i % len(PARAMS)]}) for i in range(num)]
    return llm.generate(prompts(num), params, use_tqdm=False)


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_of_an_engine_without_drafts(method: str, tmp_path: Path) -> None:
    save_model(tmp_path)
    with LLM(str(tmp_path), max_num_seqs=8, **SETTINGS) as llm:
        expected = answers(llm)
    config = METHODS[method] | ({"model": str(tmp_path)} if method == "draft_model" else {})
    with LLM(str(tmp_path), max_num_seqs=8, speculative_config=config, **SETTINGS) as llm:
        found = answers(llm)
        stats = llm.stats.scheduler
    equal = [one.outputs[0].token_ids == other.outputs[0].token_ids for one, other in zip(found, expected, strict=True)]
    assert sum(equal) >= 0.8 * len(equal), equal
    for number, output in enumerate(found):
        answer = output.outputs[0]
        assert output.error is None
        if "structured_outputs" in PARAMS[number % len(PARAMS)]:
            assert re.fullmatch(REGEX, answer.text)
        if "logprobs" in PARAMS[number % len(PARAMS)]:
            assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
    share = stats.num_accepted_tokens / stats.num_draft_tokens
    # A draft model knows neither grammars nor penalties: with float32 on a CPU, half of these drafts are accepted.
    assert share > {"ngram": 0.02, "early_exit": 0.02, "draft_model": 0.4}[method]


def test_a_model_accepts_nearly_all_of_its_own_drafts(tmp_path: Path) -> None:
    save_model(tmp_path)
    with LLM(str(tmp_path), max_num_seqs=8, speculative_model=str(tmp_path), **SETTINGS) as llm:
        llm.generate(prompts(12), SamplingParams(**GREEDY, max_tokens=60), use_tqdm=False)
        stats = llm.stats.scheduler
    assert stats.num_draft_tokens > 400
    assert stats.num_accepted_tokens > 0.85 * stats.num_draft_tokens  # the rest are near-ties


def test_answers_survive_preemption_and_prefix_hits(tmp_path: Path) -> None:
    """They are as near the best as those of an engine without drafts and with room for all."""
    reference = rounded(save_model(tmp_path), torch.float32)
    params = SamplingParams(**GREEDY, max_tokens=60, stop_token_ids=[10**6])

    def mean_shortfall(llm: LLM) -> float:
        outputs = llm.generate(prompts(16), params, use_tqdm=False)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        return float(
            torch.cat([shortfalls(reference, *pair) for pair in zip(prompts(16), answers, strict=True)]).mean()
        )

    with LLM(str(tmp_path), max_num_seqs=8, **SETTINGS) as llm:
        expected = mean_shortfall(llm)
    tight = SETTINGS | {"num_gpu_blocks_override": 24, "max_model_len": 200, "max_num_seqs": 6}
    with LLM(str(tmp_path), speculative_model=str(tmp_path), **tight) as llm:
        for _ in range(2):
            assert mean_shortfall(llm) < 1.5 * expected + 0.005
        assert llm.stats.scheduler.num_preemptions > 0
        assert llm.stats.scheduler.num_accepted_tokens > 0
