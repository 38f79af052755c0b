"""Structured output after a model's reasoning: free until it ends, under the grammar from then on."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams, StructuredOutputs
from headrace.engine.reasoning_gate import ReasoningGate
from headrace.errors import RequestError
from headrace.types import ReasoningSpan

END = "~"
TILDE, HASH = 1 + ord("~") - 33, 1 + ord("#") - 33  # tokens of the tiny model
INSIDE = ReasoningSpan((END,))
NUMBER = "[0-9]{4}"


def params(span: ReasoningSpan | None, **others: Any) -> SamplingParams:
    outputs = StructuredOutputs(regex=NUMBER, reasoning=span)
    given = {"max_tokens": 300, "seed": 3, "n": 6, "min_tokens": 8, "logit_bias": {TILDE: 2.0}, **others}
    return SamplingParams(structured_outputs=outputs, **given)


def texts(llm: LLM, given: SamplingParams) -> list[str]:
    (output,) = llm.generate([5, 6, 7], given, use_tqdm=False)
    assert output.error is None
    return [answer.text for answer in output.outputs]


def test_the_grammar_starts_where_the_reasoning_ends(llm: LLM) -> None:
    for text in texts(llm, params(INSIDE)):
        reasoning, found, answer = text.partition(END)
        assert found and re.fullmatch(NUMBER, answer), text
        assert not re.fullmatch(NUMBER, reasoning)


def test_inside_the_reasoning_the_samples_are_those_without_a_grammar(llm: LLM) -> None:
    given = params(INSIDE)
    free = dataclasses.replace(given, structured_outputs=None)
    constrained, unconstrained = (llm.generate([5, 6, 7], each, use_tqdm=False)[0].outputs for each in (given, free))
    lengths = [answer.token_ids.index(TILDE) + 1 for answer in constrained]
    assert max(lengths) > 10
    for length, ours, theirs in zip(lengths, constrained, unconstrained, strict=True):
        assert ours.token_ids[:length] == theirs.token_ids[:length]
        assert ours.token_ids[length : length + 4] != theirs.token_ids[length : length + 4]


@pytest.mark.parametrize("bias", [100.0, -100.0])
def test_reasoning_that_may_start_is_chosen_by_its_first_token(llm: LLM, bias: float) -> None:
    span = ReasoningSpan((END,), start_token_id=HASH)
    for text in texts(llm, params(span, logit_bias={TILDE: 100.0, HASH: bias})):
        assert text.startswith("#") == (bias > 0)
        assert re.fullmatch(NUMBER, text.partition(END)[2] if bias > 0 else text), text


def test_preemption_and_chunks_do_not_change_an_answer(llm: LLM, tiny_directory: Path) -> None:
    prompts, given = [[i + 1] * 30 for i in range(8)], params(INSIDE, n=1, min_tokens=60, max_tokens=120)
    expected = [llm.generate(prompt, given, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    small = LLM(str(tiny_directory), max_num_seqs=8, num_gpu_blocks_override=24, max_model_len=256)
    try:
        found = [output.outputs[0].token_ids for output in small.generate(prompts, given, use_tqdm=False)]
        assert small.stats.scheduler.num_preemptions > 0
    finally:
        small.close()
    assert found == expected


LIMITED = ReasoningSpan((END,), max_tokens=5, end_token_ids=(TILDE,))


def test_reasoning_of_limited_length_is_ended_and_the_grammar_follows(llm: LLM) -> None:
    (output,) = llm.generate([5, 6, 7], params(LIMITED, logit_bias={TILDE: -100.0}), use_tqdm=False)
    for answer in output.outputs:
        assert answer.token_ids.index(TILDE) == 5 and re.fullmatch(NUMBER, answer.text.partition(END)[2])


def test_after_limited_reasoning_an_answer_may_have_any_form(llm: LLM) -> None:
    given = params(LIMITED, logit_bias={TILDE: -100.0}, max_tokens=30, min_tokens=20)
    free = dataclasses.replace(given, structured_outputs=StructuredOutputs(reasoning=LIMITED))
    (output,) = llm.generate([5, 6, 7], free, use_tqdm=False)
    places = [answer.token_ids.index(TILDE) for answer in output.outputs]
    assert places == [5] * 6 and not any(re.fullmatch(NUMBER, text) for text in texts(llm, free))
    assert all(len(answer.token_ids) >= 20 for answer in output.outputs)
    assert llm.stats.num_constrained == 0


def test_a_limit_counts_neither_the_start_nor_what_follows_an_early_end() -> None:
    span = ReasoningSpan(("</think>",), 8, max_tokens=2, end_token_ids=(6, 5))
    limited = ReasoningGate(span, lambda token: TOKENS[token], list)
    forced = []
    for token in (8, 3, 3, 6, 5):
        forced.append(limited.forced_token_id)
        limited.read([token])
    assert forced == [None, None, None, 6, 5] and limited.is_after
    early = ReasoningGate(span, lambda token: TOKENS[token], list)
    assert early.read([8, 4, 3, 3, 3]) == [3, 3, 3] and early.forced_token_id is None


def test_a_form_is_needed_unless_the_reasoning_is_limited() -> None:
    with pytest.raises(RequestError, match="give exactly one of"):
        StructuredOutputs(reasoning=INSIDE)


def test_a_user_cannot_set_the_span() -> None:
    with pytest.raises(RequestError, match="reasoning cannot be set"):
        StructuredOutputs.of({"regex": "a", "reasoning": {"end_texts": ["x"]}})


def gate(*ends: str, start: int | None = None) -> ReasoningGate:
    return ReasoningGate(ReasoningSpan(ends, start), lambda token: TOKENS[token], list)


TOKENS = [b"<", b"/think", b">", b"a", b"</think>", b"think>{", b"</", b"> \n{", b"<think>"]


@pytest.mark.parametrize(
    ("tokens", "read"),
    [
        ([3, 4, 3, 3], [3, 3]),
        ([3, 0, 1, 2, 3], [3]),
        ([3, 6, 5], [ord("{")]),
        ([0, 1, 7, 3], [ord("{"), 3]),
        ([3, 3, 0, 1], []),
        ([4], []),
    ],
)
def test_the_end_is_found_across_tokens_and_within_one(tokens: list[int], read: list[int]) -> None:
    assert gate("</think>").read(tokens) == read
    one_by_one = gate("</think>")
    assert [token for each in tokens for token in (one_by_one.read([each]) if each is not None else [])] == read


def test_an_end_may_contain_the_start() -> None:
    assert gate("<think>a", start=8).read([8, 3, 2]) == [2]
    assert gate("</think>", start=8).read([3, 4]) == [3, 4], "no reasoning: all of it is the answer"
