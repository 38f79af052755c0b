"""Structured output end to end, with a model of random weights, which would say anything else."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import llguidance
import pytest

from headrace import LLM, AsyncEngine, RequestOutput, SamplingParams, StructuredOutputs, StructuredOutputsParams
from headrace.errors import RequestError
from tests.engine.json_schemas import SCHEMAS, fits
from tests.engine.tiny import SHAPE

REGEXES = [
    r"\d{3}-\d{4}",
    r"(yes|no|maybe)!?",
    r"[A-Z][a-z]{1,6}( [A-Z][a-z]{1,6}){0,2}",
    r"[a-z]+@[a-z]+\.(com|org)",
    r"(0|1){8}",
    r"#[0-9a-f]{6}",
    r"\"[^\"]{0,5}\"",
    r"x{2,5}y?z*w",
    r"[^a-z\s]{3}",
    r"(?:ab|cd){2}",
]
CHOICES = ("positive", "negative", "neutral", 'with "quotes"', "two\nlines", "日本", "pos")
LARK = r"""
start: expr
expr: NUMBER | "(" expr OP expr ")"
OP: "+" | "-" | "*"
NUMBER: /[0-9]{1,2}/
"""


def structured(**outputs: Any) -> SamplingParams:
    return SamplingParams(max_tokens=400, seed=3, structured_outputs=StructuredOutputs(**outputs))


def answers(outputs: list[RequestOutput]) -> list[str]:
    for output in outputs:
        assert output.error is None
        assert [answer.finish_reason for answer in output.outputs] == ["stop"] * len(output.outputs)
    return [answer.text for output in outputs for answer in output.outputs]


def prompts(num: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 95) for _ in range(rng.randrange(3, 60))] for _ in range(num)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_follows_its_schema(llm: LLM, temperature: float) -> None:
    params = [dataclasses.replace(structured(json=schema), temperature=temperature) for schema in SCHEMAS.values()]
    assert len(params) > 30
    texts = answers(llm.generate(prompts(len(params)), params, use_tqdm=False))
    for text, (name, schema) in zip(texts, SCHEMAS.items(), strict=True):
        assert fits(json.loads(text), schema), (name, text)


def test_an_answer_matches_its_regex(llm: LLM) -> None:
    params = [dataclasses.replace(structured(regex=regex), n=3) for regex in REGEXES]
    texts = answers(llm.generate(prompts(len(REGEXES)), params, use_tqdm=False))
    for place, text in enumerate(texts):
        assert re.fullmatch(REGEXES[place // 3], text), (REGEXES[place // 3], text)


def test_an_answer_is_one_of_the_choices(llm: LLM) -> None:
    texts = answers(llm.generate(prompts(30), structured(choice=CHOICES), use_tqdm=False))
    assert set(texts) <= set(CHOICES)
    assert len(set(texts)) > 1


def balanced(text: str) -> bool:
    while (shorter := re.sub(r"\(\d{1,2}[-+*]\d{1,2}\)", "1", text)) != text:
        text = shorter
    return re.fullmatch(r"\d{1,2}", text) is not None


def test_an_answer_follows_a_lark_grammar(llm: LLM) -> None:
    texts = answers(llm.generate(prompts(10), structured(grammar=LARK), use_tqdm=False))
    assert all(balanced(text) for text in texts), texts


def test_a_grammar_may_be_in_gbnf(llm: LLM) -> None:
    (text,) = answers(llm.generate("a", structured(grammar='root ::= "a" ("b" | "c"){2}'), use_tqdm=False))
    assert re.fullmatch("a[bc]{2}", text)


def test_json_object_gives_an_object(llm: LLM) -> None:
    params = dataclasses.replace(
        structured(json_object=True), logit_bias={1 + ord("}") - 33: 100}
    )  # without it the object would not end
    (text,) = answers(llm.generate("a", params, use_tqdm=False))
    assert isinstance(json.loads(text), dict)


def test_a_truncated_answer_has_finish_reason_length(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, structured_outputs={"regex": "[a-z]{10}"})
    (output,) = llm.generate("a", params, use_tqdm=False)
    assert re.fullmatch("[a-z]{3}", output.outputs[0].text)
    assert output.outputs[0].finish_reason == "length"


def test_every_sequence_of_a_request_has_its_own_grammar_state(llm: LLM) -> None:
    texts = answers(llm.generate("a", dataclasses.replace(structured(regex="[a-z]{1,12}[0-9]"), n=6), use_tqdm=False))
    assert all(re.fullmatch("[a-z]{1,12}[0-9]", text) for text in texts)
    assert len(set(texts)) > 3


def test_the_same_seed_gives_the_same_answer(llm: LLM) -> None:
    first, again = (answers(llm.generate(prompts(4), structured(regex="[a-z]{20}"), use_tqdm=False)) for _ in range(2))
    assert first == again


def test_log_probabilities_are_the_models_before_the_grammar_applies(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    (free,) = llm.generate([5, 6, 7], params, use_tqdm=False)
    unlikely = next(chr(code) for code in range(97, 123) if free.outputs[0].text != chr(code))
    constrained = dataclasses.replace(params, structured_outputs=StructuredOutputs(choice=[unlikely]))
    (forced,) = llm.generate([5, 6, 7], constrained, use_tqdm=False)
    assert free.outputs[0].logprobs is not None and forced.outputs[0].logprobs is not None
    ours, best = forced.outputs[0].logprobs[0], free.outputs[0].logprobs[0]
    assert forced.outputs[0].text == unlikely
    assert ours.rank > 1 and ours.logprob < best.logprob
    assert ours.top_token_ids == best.top_token_ids


def test_constrained_sequences_in_the_batch_do_not_change_an_answer(llm: LLM) -> None:
    free = [
        SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.7, top_p=0.9, seed=2, max_tokens=30, n=2, ignore_eos=True),
        SamplingParams(temperature=1.0, top_k=5, seed=3, max_tokens=30, logprobs=2, presence_penalty=1.0),
    ]
    asked = prompts(4, seed=9)
    alone = llm.generate(asked, free, use_tqdm=False)
    constrained = [
        structured(json=SCHEMAS["record"]),
        structured(regex="[a-z]{25}"),
        structured(choice=CHOICES),
        structured(json=SCHEMAS["nested"]),
    ]
    mixed = [params for pair in zip(free, constrained, strict=True) for params in pair]
    doubled = [prompt for prompt in asked for _ in range(2)]
    beside = llm.generate(doubled, mixed, use_tqdm=False)[::2]
    tokens = [[answer.token_ids for answer in output.outputs] for output in beside]
    assert tokens == [[answer.token_ids for answer in output.outputs] for output in alone]


def test_prefix_caching_chunks_and_preemption_do_not_change_an_answer(tiny_directory: Path) -> None:
    head = prompts(1, seed=4)[0] * 2
    asked = [head + tail for tail in prompts(8, seed=5)]
    regex = "[a-z ]{90,100}[0-9]"
    params = [dataclasses.replace(structured(regex=regex), seed=i, temperature=0.9, max_tokens=110) for i in range(8)]
    with LLM(str(tiny_directory), max_num_seqs=8, num_gpu_blocks_override=400) as roomy:
        expected = answers(roomy.generate(asked, params, use_tqdm=False))
    tight = {"max_num_seqs": 6, "num_gpu_blocks_override": 30, "max_num_batched_tokens": 24, "max_model_len": 256}
    with LLM(str(tiny_directory), **tight) as llm:
        found = answers(llm.generate(asked, params, use_tqdm=False))
        stats = llm.stats.scheduler
    assert stats.num_preemptions > 0 and stats.num_prefix_hit_tokens > 0
    assert found == expected
    assert all(re.fullmatch(regex, text) for text in found)


def test_min_tokens_applies_while_the_grammar_allows_more_tokens(llm: LLM) -> None:
    longer = dataclasses.replace(structured(regex="[a-z]{1,40}"), min_tokens=20)
    (text,) = answers(llm.generate("a", longer, use_tqdm=False))
    assert 20 <= len(text) <= 40
    (text,) = answers(
        llm.generate("a", dataclasses.replace(structured(regex="[a-z]{3}"), min_tokens=20), use_tqdm=False)
    )
    assert re.fullmatch("[a-z]{3}", text)


def test_a_stop_token_ends_a_complete_answer_when_eos_is_ignored(llm: LLM) -> None:
    bell = SHAPE["vocab_size"] - 1
    params = dataclasses.replace(structured(regex="[a-z]{3}"), ignore_eos=True, stop_token_ids=[bell])
    (output,) = llm.generate("a", params, use_tqdm=False)
    assert output.outputs[0].token_ids[-1] == bell and len(output.outputs[0].token_ids) == 4
    with pytest.raises(RequestError, match=r"could not end.*stop_token_ids") as refused:
        llm.generate("a", dataclasses.replace(params, stop_token_ids=()), use_tqdm=False)
    assert refused.value.param == "structured_outputs"


def test_a_stop_string_ends_a_constrained_answer(llm: LLM) -> None:
    (output,) = llm.generate("a", dataclasses.replace(structured(regex="(ab){30}"), stop="bab"), use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("a", "bab")


def test_a_request_without_an_allowed_token_fails_alone(llm: LLM) -> None:
    params = [dataclasses.replace(structured(regex="[a-z]{3}"), allowed_token_ids=[5]), structured(regex="[a-z]{3}")]
    bad, good = llm.generate(["a", "b"], params, use_tqdm=False)
    assert bad.error is not None and "structured_outputs" in bad.error
    assert re.fullmatch("[a-z]{3}", good.outputs[0].text)


def test_a_grammar_that_becomes_too_complex_fails_with_a_reason(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = llguidance.LLParserLimits(max_items_in_row=30, verbose_errors=False)
    monkeypatch.setattr("headrace.engine.grammars._limits", lambda: limits)
    ambiguous = 'start: s\ns: s s s | s s | "a"'
    long = dataclasses.replace(structured(grammar=ambiguous), min_tokens=100)
    bad, good = llm.generate(["a", "b"], [long, structured(regex="b")], use_tqdm=False)
    assert bad.error is not None and "too complex" in bad.error
    assert good.outputs[0].text == "b"


def test_chat_accepts_structured_outputs(llm: LLM) -> None:
    (text,) = answers(llm.chat([{"role": "user", "content": "hi"}], structured(choice=["yes", "no"]), use_tqdm=False))
    assert text in ("yes", "no")


def test_a_stream_follows_its_grammar_and_a_bad_one_is_refused(tiny_directory: Path) -> None:
    async def scenario() -> tuple[list[str], str]:
        engine = await AsyncEngine.start(str(tiny_directory), max_num_seqs=4, num_gpu_blocks_override=64)
        try:
            texts = [output.outputs[0].text async for output in engine.generate("a", structured(regex="[a-z]{9}"))]
            with pytest.raises(RequestError) as refused:
                async for _ in engine.generate("a", structured(regex="a(b")):
                    pass
            async for _ in engine.generate("a", structured(regex="[a-z]{200}")):
                break  # aborts the request
            async for output in engine.generate("a", structured(regex="ab")):
                last = output.outputs[0].text
            assert last == "ab"
            assert engine.stats.num_constrained == 0
            return texts, str(refused.value)
        finally:
            await engine.close()

    texts, message = asyncio.run(scenario())
    assert re.fullmatch("[a-z]{9}", texts[-1])
    assert texts == sorted(texts, key=len)  # a reader that is late gets several tokens at once
    assert all(texts[-1].startswith(text) for text in texts)
    assert "unclosed group" in message


# ---- refused before compiling


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one"),
        ({"json": {}, "regex": "a"}, "exactly one"),
        ({"regex": "a", "json_object": True}, "exactly one"),
        ({"regex": ""}, "non-empty"),
        ({"regex": 5}, "text"),
        ({"choice": []}, "at least one"),
        ({"choice": "yes"}, "list"),
        ({"choice": ["a", ""]}, "non-empty"),
        ({"choice": [1]}, "non-empty"),
        ({"json": "{"}, "not JSON"),
        ({"json": "[]"}, "must be an object"),
        ({"json": True}, "must be an object"),
        ({"json": {"const": float("nan")}}, "not JSON"),
        ({"json": {"const": object()}}, "not JSON"),
        ({"json": '{"a":' * 100_000}, "JSON"),
        ({"json_object": 1}, "true or false"),
        ({"regex": "a" * 200_000}, "131,072"),
        ({"grammar": 'start: "\ud800"'}, "Unicode"),
        ({"jsn": {}}, "did you mean 'json'"),
    ],
)
def test_invalid_structured_outputs_are_refused_at_construction(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(structured_outputs=given)


def test_a_schema_that_contains_itself_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(RequestError):
        StructuredOutputs(json=schema)


def test_equal_structures_compare_equal_however_they_are_written() -> None:
    assert StructuredOutputs(json='{"type": "null"}') == StructuredOutputs(json={"type": "null"})
    assert hash(StructuredOutputs(choice=["a"])) == hash(StructuredOutputs(choice=("a",), asked_as="tools"))
    assert StructuredOutputsParams is StructuredOutputs
    with pytest.raises(RequestError, match="structured_outputs must be"):
        SamplingParams(structured_outputs="yes")
