"""Speculative decoding end to end: whatever is drafted, answers are those of an engine without drafts."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace import LLM, RequestOutput, SamplingParams, StructuredOutputs
from headrace.config import EngineConfig
from headrace.engine import speculating
from headrace.errors import ConfigError
from headrace.speculation import SpeculativeConfig
from tests.engine.tiny import SHAPE, save_model

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
EARLY_EXIT = {"method": "early_exit", "num_layers": 2, "num_speculative_tokens": 3}
TIGHT: dict[str, Any] = {"num_gpu_blocks_override": 20, "block_size": 8, "max_model_len": 144, "max_num_seqs": 6}
NEVER_SAMPLED = (10**6,)
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}}, "required": ["a"]}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seed": {"seed": 3},
    "filters": {"seed": 4, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "sampled penalties": {"seed": 5, "frequency_penalty": 1.0},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "bias": {"seed": 6, "logit_bias": dict.fromkeys(range(40), 4.0)},
    "bad words": {"temperature": 0, "bad_words_token_ids": [[token] for token in range(7, 300, 7)]},
    "several": {"seed": 7, "n": 3},
    "stop": {"seed": 8, "stop": ["e", "t"], "min_tokens": 5},
    "stop tokens": {"seed": 9, "stop_token_ids": list(range(10, 20)), "min_tokens": 8},
    "grammar": {"seed": 10, "structured_outputs": StructuredOutputs(json=SCHEMA)},
    "loose grammar": {"seed": 11, "structured_outputs": StructuredOutputs(regex="(ab|cd){40}[xyz]{3}"), "logprobs": 1},
}


@pytest.fixture(autouse=True)
def _drafts_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model drafts whatever the acceptance is."""
    monkeypatch.setattr(speculating, "CPU_FREE_ROWS", 1e9)
    monkeypatch.setattr(speculating, "_wait_cost", lambda *_: 0.0)
    monkeypatch.setattr(speculating, "_draft_cost", lambda *_: 0.0)


@pytest.fixture(scope="module")
def draft_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tokenizer, and weights that are similar to those of the tiny model."""
    directory = tmp_path_factory.mktemp("draft")
    model = save_model(directory)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.005 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory


def prompts(num: int) -> list[list[int]]:
    """With words that occur several times."""
    rng = random.Random(4)
    words = [[rng.randrange(1, 95) for _ in range(4)] for _ in range(3)]
    return [[token for _ in range(3 + i % 5) for token in rng.choice(words)] for i in range(num)]


def answers(llm: LLM) -> list[RequestOutput]:
    params = [
        SamplingParams(**{"max_tokens": 40, "ignore_eos": "structured_outputs" not in each, **each})
        for each in PARAMS.values()
    ]
    return llm.generate(prompts(len(params)), params, use_tqdm=False)


def comparable(outputs: list[RequestOutput]) -> list[Any]:
    return [
        [(answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason) for answer in output.outputs]
        for output in outputs
    ]


@pytest.fixture(scope="module")
def expected(tiny_directory: Path) -> Iterator[list[RequestOutput]]:
    with LLM(str(tiny_directory), max_num_seqs=8, num_gpu_blocks_override=256) as llm:
        yield answers(llm)


@pytest.mark.parametrize(
    ("method", "least_share"),
    [
        ("ngram", 0.02),
        ("the model itself", 0.3),  # it drafts without penalties, biases and grammars
        pytest.param("early_exit", 0.02, marks=pytest.mark.slow),
        pytest.param("draft_model", 0.01, marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_of_an_engine_without_drafts(
    method: str, least_share: float, tiny_directory: Path, draft_directory: Path, expected: list[RequestOutput]
) -> None:
    model = tiny_directory if method == "the model itself" else draft_directory
    config = {"ngram": NGRAM, "early_exit": EARLY_EXIT}.get(method, {"model": str(model)})
    with LLM(str(tiny_directory), speculative_config=config, max_num_seqs=8, num_gpu_blocks_override=256) as llm:
        found = answers(llm)
        stats = llm.stats.scheduler
    for name, one, other in zip(PARAMS, comparable(found), comparable(expected), strict=True):
        assert one == other, name
    assert stats.num_accepted_tokens > least_share * stats.num_draft_tokens > 0
    assert logprobs_of(found) == pytest.approx(logprobs_of(expected), abs=1e-3)


def logprobs_of(outputs: list[RequestOutput]) -> list[float]:
    """Those of all tokens that have them, and of their alternatives."""
    entries = [entry for output in outputs for answer in output.outputs for entry in answer.logprobs or ()]
    assert len(entries) > 60
    return [value for entry in entries for value in (entry.logprob, *entry.top_logprobs)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_answers_stay_the_same_through_preemption_and_prefix_hits(method: str, tiny_directory: Path) -> None:
    config = NGRAM if method == "ngram" else {"model": str(tiny_directory)}
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop_token_ids=list(NEVER_SAMPLED))
    with LLM(str(tiny_directory), max_num_seqs=8) as plain:
        wanted = comparable(plain.generate(prompts(12), params, use_tqdm=False))
    with LLM(str(tiny_directory), speculative_config=config, **TIGHT) as llm:
        assert comparable(llm.generate(prompts(12), params, use_tqdm=False)) == wanted
        assert comparable(llm.generate(prompts(12), params, use_tqdm=False)) == wanted
        assert llm.stats.scheduler.num_preemptions > 0
        assert llm.stats.scheduler.num_prefix_hit_tokens > 0
        assert llm.stats.scheduler.num_accepted_tokens > 0


@pytest.mark.slow
def test_the_distribution_is_unchanged(tiny_directory: Path, draft_directory: Path) -> None:
    """Third tokens, which drafts decide, against the model's own probabilities: chi-square."""
    num_samples, prompt = 1500, prompts(1)[0]
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.5, n=num_samples)
    settings: dict[str, Any] = {"speculative_model": str(draft_directory), "num_speculative_tokens": 2}
    with LLM(str(tiny_directory), max_num_seqs=8, **settings) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        stats = llm.stats.scheduler
    assert 0.2 * stats.num_draft_tokens < stats.num_accepted_tokens < 0.9 * stats.num_draft_tokens
    counts = Counter(answer.token_ids[2] for answer in output.outputs)
    expected = num_samples * third_token_probabilities(tiny_directory, prompt, temperature=0.5)
    usual = (expected >= 8).nonzero()[:, 0].tolist()
    assert len(usual) >= 10
    cells = [(counts[token], float(expected[token])) for token in usual]
    cells.append((num_samples - sum(count for count, _ in cells), num_samples - sum(wanted for _, wanted in cells)))
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in cells)
    freedom = len(cells) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def third_token_probabilities(directory: Path, prompt: list[int], *, temperature: float) -> torch.Tensor:
    """[V], over the likely first and second tokens; what is left out is less than one in a hundred."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    contexts, weights = torch.tensor([prompt]), torch.ones(1, dtype=torch.float64)
    for _ in range(3):
        with torch.inference_mode():
            logits = torch.cat([model(part).logits[:, -1] for part in contexts.split(256)])
        joint = weights[:, None] * torch.softmax(logits.double() / temperature, 1)
        rows, tokens = (joint > 1e-6).nonzero().T
        contexts, weights = torch.cat([contexts[rows], tokens[:, None]], 1), joint[rows, tokens]
    assert joint.sum() > 0.99
    return joint.sum(0)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"speculative_config": NGRAM, "pipeline_parallel_size": 2}, "one stage at a time would work"),
        ({"speculative_config": {"method": "early_exit", "num_layers": 3}}, "less than the model's 3 layers"),
        ({"speculative_config": {"method": "eagle", "model": "x"}}, "method='eagle' is not supported"),
        ({"speculative_config": {"num_spec_tokens": 2}}, "has no key 'num_spec_tokens'"),
        ({"speculative_config": {"method": "draft_model"}}, "needs a model"),
        ({"speculative_config": {"method": "early_exit"}}, "needs num_layers"),
        ({"speculative_config": {"prompt_lookup_min": 5, "prompt_lookup_max": 2}}, "is more than prompt_lookup_max=2"),
        ({"speculative_config": {"model": "a"}, "speculative_model": "b"}, "differ; give one"),
        ({"num_speculative_tokens": -1}, "must be an integer between 1 and 64"),
    ],
)
def test_what_is_not_supported_is_refused_with_the_reason(
    settings: dict[str, Any], reason: str, tiny_directory: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLM(str(tiny_directory), **settings)


def test_a_draft_model_with_another_vocabulary_is_refused(tiny_directory: Path, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**SHAPE, "vocab_size": 321})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has 321 tokens, and the model 320"):
        LLM(str(tiny_directory), speculative_model=str(tmp_path))


@pytest.mark.parametrize(
    ("draft", "changes", "reason"),
    [
        ({}, {"draft_tensor_parallel_size": 1}, "draft_tensor_parallel_size=1 must be tensor_parallel_size=2"),
        (
            {"num_attention_heads": 1, "num_key_value_heads": 1},
            {},
            "the draft model .* tensor_parallel_size=2 does not divide the model: 1 query heads",
        ),
    ],
)
def test_a_draft_model_that_the_ranks_of_the_model_cannot_divide_is_refused(
    draft: dict[str, Any], changes: dict[str, Any], reason: str, tiny_directory: Path, tmp_path: Path
) -> None:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE | draft)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        LLM(
            str(tiny_directory),
            device="cpu",
            tensor_parallel_size=2,
            speculative_config={"model": str(tmp_path), **changes},
        )


def test_zero_tokens_turn_it_off() -> None:
    for settings in ({"num_speculative_tokens": 0}, {"speculative_config": NGRAM | {"num_speculative_tokens": 0}}):
        assert EngineConfig(**settings).speculative is None
    assert EngineConfig(speculative_model="[ngram]").speculative == SpeculativeConfig(method="ngram")
    assert EngineConfig(num_speculative_tokens=3).speculative == SpeculativeConfig(method="ngram", num_tokens=3)
