"""Sampling features end to end: compared with transformers, under preemption, and beside sequences without them."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from headrace import LLM, SamplingParams
from headrace.errors import RequestError
from tests.engine.tiny import SHAPE, save_model

pytestmark = pytest.mark.parity

NUM_TOKENS = 24
NEVER_SAMPLED = (10**6,)  # outside the vocabulary, but a stop token makes the length unknown: preemption can happen
TIGHT: dict[str, Any] = {"num_gpu_blocks_override": 14, "block_size": 8, "max_model_len": 112, "max_num_seqs": 6}
BIASES = {token: 3.0 * (token % 5) for token in range(1, 41)}
BAD_WORDS = [[token] for token in range(7, 300, 7)] + [[5, 6], [8, 9, 10]]
FEATURES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "plain": ({}, []),
    "repetition": ({"repetition_penalty": 1.4}, [RepetitionPenaltyLogitsProcessor(1.4)]),
    "bias": ({"logit_bias": BIASES}, [SequenceBiasLogitsProcessor([[[t], b] for t, b in BIASES.items()])]),
    "bad words": ({"bad_words_token_ids": BAD_WORDS}, [NoBadWordsLogitsProcessor(BAD_WORDS, eos_token_id=None)]),
    "all": (
        {"bad_words_token_ids": BAD_WORDS, "logit_bias": BIASES, "repetition_penalty": 1.4},
        [
            NoBadWordsLogitsProcessor(BAD_WORDS, eos_token_id=None),
            SequenceBiasLogitsProcessor([[[t], b] for t, b in BIASES.items()]),
            RepetitionPenaltyLogitsProcessor(1.4),
        ],
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("tiny")
    return directory, save_model(directory)


def prompts() -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(1, SHAPE["vocab_size"]) for _ in range(n)] for n in (1, 8, 17, 30, 41, 3, 16, 25, 60, 33)]


def processed_greedy(model: PreTrainedModel, prompt: list[int], processors: list[Any]) -> list[int]:
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            scores = LogitsProcessorList(processors)(tokens, model(tokens).logits[:, -1])
            tokens = torch.cat([tokens, scores.argmax(1, keepdim=True)], dim=1)
    return tokens[0, len(prompt) :].tolist()


def test_greedy_answers_equal_those_of_transformers_processors_through_preemption(
    model: tuple[Path, PreTrainedModel],
) -> None:
    directory, reference = model
    kinds = [list(FEATURES.values())[i % len(FEATURES)] for i in range(len(prompts()))]
    params = [
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, stop_token_ids=NEVER_SAMPLED, **settings)
        for settings, _ in kinds
    ]
    with LLM(str(directory), **TIGHT) as llm:
        outputs = llm.generate(prompts(), params, use_tqdm=False)
        assert llm.stats.scheduler.num_preemptions > 0
    for output, prompt, (_, processors) in zip(outputs, prompts(), kinds, strict=True):
        assert list(output.outputs[0].token_ids) == processed_greedy(reference, prompt, processors)


SAMPLED: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"top_k": 20, "repetition_penalty": 1.2},
    {"allowed_token_ids": list(range(50, 90))},
    {"logit_bias": {3: 5.0}, "top_p": 0.8},
]


def test_sampled_answers_are_the_same_alone_together_and_through_preemption(tiny_directory: Path) -> None:
    params = [
        SamplingParams(
            max_tokens=NUM_TOKENS, ignore_eos=True, stop_token_ids=NEVER_SAMPLED, seed=i, **SAMPLED[i % len(SAMPLED)]
        )
        for i in range(len(prompts()))
    ]
    with LLM(str(tiny_directory), max_num_seqs=8) as roomy:
        together = [o.outputs[0].token_ids for o in roomy.generate(prompts(), params, use_tqdm=False)]
        alone = [
            roomy.generate([prompt], each, use_tqdm=False)[0].outputs[0].token_ids
            for prompt, each in zip(prompts(), params, strict=True)
        ]
    with LLM(str(tiny_directory), **TIGHT) as tight:
        preempted = [o.outputs[0].token_ids for o in tight.generate(prompts(), params, use_tqdm=False)]
        assert tight.stats.scheduler.num_preemptions > 0
    assert together == alone == preempted
    assert set(together[3]) <= set(range(50, 90))


def test_a_strong_repetition_penalty_prevents_repeated_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    plain, penalized = llm.generate(
        ["again and again"] * 2,
        [params, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, repetition_penalty=100.0)],
        use_tqdm=False,
    )
    assert len(set(plain.outputs[0].token_ids)) < 60
    assert len(set(penalized.outputs[0].token_ids)) == 60


def test_bad_words_are_tokenized_and_never_generated(llm: LLM) -> None:
    letters = llm.get_tokenizer().encode("abcdefgh ")
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "allowed_token_ids": letters}
    (before,) = llm.generate("hello", SamplingParams(**options), use_tqdm=False)
    word = before.outputs[0].text[5:8].strip()
    (after,) = llm.generate("hello", SamplingParams(**options, bad_words=[word]), use_tqdm=False)
    assert len(word) > 1 and word in before.outputs[0].text
    assert word not in after.outputs[0].text
    assert after.outputs[0].text[:5] == before.outputs[0].text[:5]


def test_a_token_outside_the_vocabulary_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt 0: logit_bias has token id 320, but the vocabulary has 320 tokens"):
        llm.generate("a", SamplingParams(logit_bias={320: 1.0}), use_tqdm=False)


def test_a_request_that_forbids_every_token_fails_with_the_reason(llm: LLM) -> None:
    params = SamplingParams(allowed_token_ids=[5], bad_words_token_ids=[[5]], max_tokens=4)
    (output,) = llm.generate("a", params, use_tqdm=False)
    assert output.error is not None
    assert "forbid every token" in output.error


# ---- log-probabilities of prompts


def prompt_logprobs_of(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """[len - 1, V]: log-probabilities of each token but the first."""
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)


@pytest.mark.parametrize(
    "settings",
    [{"max_num_seqs": 8}, {"max_num_seqs": 4, "max_num_batched_tokens": 11, "block_size": 8}, TIGHT],
    ids=["whole", "chunks", "preemption"],
)
def test_log_probabilities_of_prompts_are_those_of_transformers(
    model: tuple[Path, PreTrainedModel], settings: dict[str, Any]
) -> None:
    directory, reference = model
    plain = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, stop_token_ids=NEVER_SAMPLED)
    requesting = dataclasses.replace(plain, prompt_logprobs=2)
    params = [requesting if i % 3 else plain for i in range(len(prompts()))]
    with LLM(str(directory), **settings) as llm:
        without = llm.generate(prompts(), plain, use_tqdm=False)  # leaves prefixes that the next call could hit
        outputs = llm.generate(prompts(), params, use_tqdm=False)
        assert (llm.stats.scheduler.num_preemptions > 0) == (settings is TIGHT)
    for output, before, prompt, each in zip(outputs, without, prompts(), params, strict=True):
        assert output.outputs[0].token_ids == before.outputs[0].token_ids
        if each is plain:
            assert output.prompt_logprobs is None
            continue
        found = output.prompt_logprobs
        assert found is not None and len(found) == len(prompt) and found[0] is None
        expected = prompt_logprobs_of(reference, prompt)
        for position, entry in enumerate(found[1:]):
            assert entry is not None and entry.token_id == prompt[position + 1]
            assert entry.logprob == pytest.approx(float(expected[position, entry.token_id]), abs=2e-3)
            assert entry.rank == pytest.approx(1 + int((expected[position] > entry.logprob).sum()), abs=1)
            assert list(entry.top_token_ids) == expected[position].topk(2).indices.tolist()
            assert entry.top_logprobs == pytest.approx(expected[position].topk(2).values.tolist(), abs=2e-3)


def test_a_request_with_several_answers_has_prompt_logprobs_once(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=4, prompt_logprobs=0, ignore_eos=True)
    (output,) = llm.generate([[5, 6, 7, 8] * 10], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    assert [entry and entry.token_id for entry in output.prompt_logprobs] == [None, *([5, 6, 7, 8] * 10)[1:]]
    assert len(output.outputs) == 3


def test_the_first_prompt_token_has_no_logprob(llm: LLM) -> None:
    (output,) = llm.generate([[5]], SamplingParams(max_tokens=2, prompt_logprobs=1), use_tqdm=False)
    assert output.prompt_logprobs == (None,)


def test_prompt_logprobs_skip_the_prefix_cache_and_other_requests_use_it(tiny_directory: Path) -> None:
    prompt = list(range(1, 49))
    with LLM(str(tiny_directory), max_num_seqs=4, block_size=16) as llm:
        asked, plain = SamplingParams(max_tokens=2, prompt_logprobs=0), SamplingParams(max_tokens=2)
        cached = [llm.generate([prompt], each, use_tqdm=False)[0].num_cached_tokens for each in (asked, asked, plain)]
    assert cached[:2] == [0, 0]
    assert cached[2] > 0
