"""The default model with grammars: a large vocabulary and meaningful answers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from headrace import LLM, SamplingParams, StructuredOutputs
from headrace.text.tool_calls import parse
from headrace.text.tools.grammar import tools_grammar
from tests.engine.json_schemas import SCHEMAS, fits, record

pytestmark = pytest.mark.embedded


def ask(llm: LLM, question: str, **params: Any) -> str:
    (output,) = llm.chat([{"role": "user", "content": question}], SamplingParams(**params), use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop", output.outputs[0].text
    return output.outputs[0].text


@pytest.mark.slow
def test_json_follows_its_schema(smollm: LLM) -> None:
    params = [
        SamplingParams(max_tokens=250, seed=i, temperature=i % 3 / 2, structured_outputs=StructuredOutputs(json=schema))
        for i, schema in enumerate(SCHEMAS.values())
    ]
    outputs = smollm.chat([[{"role": "user", "content": "Answer in JSON."}]] * len(params), params, use_tqdm=False)
    for output, (name, schema) in zip(outputs, SCHEMAS.items(), strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason == "stop", (name, answer.text)
        assert fits(json.loads(answer.text), schema), (name, answer.text)


def test_a_question_is_answered_within_its_schema_and_choices(smollm: LLM) -> None:
    schema = record(capital={"type": "string", "maxLength": 20}, continent={"enum": ["Europe", "Asia", "Africa"]})
    outputs = StructuredOutputs(json=schema)
    text = ask(smollm, "What is the capital of France?", temperature=0, max_tokens=80, structured_outputs=outputs)
    assert json.loads(text)["capital"] == "Paris"
    choice = StructuredOutputs(choice=["Paris", "London", "Rome"])
    assert ask(smollm, "What is the capital of France?", temperature=0, structured_outputs=choice) in choice.choice


def test_answers_match_regexes_with_a_large_vocabulary(smollm: LLM) -> None:
    for regex in (
        r"\d{4}-\d{2}-\d{2}",
        r"[A-Z][a-z]{1,9}( [a-z]{1,9}){2,5}\.",
        r"(\w{1,8}, ){3}\w",
        r"[^\x00-\x7F]{3}",
    ):
        text = ask(smollm, "Say something.", max_tokens=120, seed=7, structured_outputs=StructuredOutputs(regex=regex))
        assert re.fullmatch(regex, text), (regex, text)


def test_a_forced_tool_call_is_parsed(smollm: LLM) -> None:
    schema = record(city={"type": "string", "maxLength": 20})
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]
    outputs = tools_grammar(tools, "required", "hermes", parallel_tool_calls=False)
    text = ask(smollm, "How is the weather in Berlin?", temperature=0, max_tokens=80, structured_outputs=outputs)
    (call,) = parse(text, "hermes").tool_calls
    assert call.name == "get_weather" and fits(json.loads(call.arguments), schema)
