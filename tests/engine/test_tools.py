"""Forced tool calls: the answer of a random model is always calls with valid arguments."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.engine.grammars import Grammars
from headrace.errors import RequestError
from headrace.text.tool_calls import PARSERS, parse, parser_for
from headrace.text.tool_grammar import MAX_CALLS, tools_grammar
from tests.engine.json_schemas import fits, record
from tests.text.builders import byte_tokenizer

WEATHER = record(city={"type": "string", "maxLength": 5}, unit={"enum": ["celsius", "fahrenheit"]})
LEVEL = {
    "$defs": {"level": {"type": "integer", "minimum": 1, "maximum": 3}},
    **record(level={"$ref": "#/$defs/level"}, loud={"type": "boolean"}),
}
SCHEMAS: dict[str, Any] = {"get_weather": WEATHER, "set-level.2": LEVEL, "ping": record()}


def tool(name: str, schema: Any = None) -> dict[str, Any]:
    function = {"name": name, "description": "does it", **({} if schema is None else {"parameters": schema})}
    return {"type": "function", "function": function}


TOOLS = [tool("get_weather", WEATHER), tool("set-level.2", LEVEL), tool("ping")]
REQUIRED = "required"
NAMED = {"type": "function", "function": {"name": "set-level.2"}}


@pytest.mark.parametrize("name", sorted(PARSERS))
@pytest.mark.parametrize("tool_choice", [REQUIRED, NAMED], ids=["required", "named"])
def test_a_forced_answer_parses_as_calls_with_valid_arguments(llm: LLM, name: str, tool_choice: Any) -> None:
    outputs = tools_grammar(TOOLS, tool_choice, name, parallel_tool_calls=False)
    params = SamplingParams(max_tokens=300, seed=1, n=4, structured_outputs=outputs)
    (output,) = llm.generate("a", params, use_tqdm=False)
    for answer in output.outputs:
        assert answer.finish_reason == "stop"
        found = parse(answer.text, name, SCHEMAS)
        assert found.content == "" and len(found.tool_calls) == 1
        (call,) = found.tool_calls
        assert fits(json.loads(call.arguments), SCHEMAS[call.name])
        assert tool_choice == REQUIRED or call.name == "set-level.2"


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_required_allows_several_calls(llm: LLM, name: str) -> None:
    outputs = tools_grammar([tool("ping")], REQUIRED, name)
    params = SamplingParams(max_tokens=250, seed=2, n=6, min_tokens=60, structured_outputs=outputs)
    (output,) = llm.generate("a", params, use_tqdm=False)
    numbers = set()
    for answer in output.outputs:
        if answer.finish_reason == "stop":
            found = parse(answer.text, name)
            assert found.content == "" and {
                (call.name, json.loads(call.arguments) == {}) for call in found.tool_calls
            } == {("ping", True)}
            numbers.add(len(found.tool_calls))
    assert max(numbers) > 1 and max(numbers) <= MAX_CALLS


def test_a_marker_that_is_a_special_token_is_forced_as_that_token() -> None:
    tokenizer = byte_tokenizer(special=["[TOOL_CALLS]"])
    grammars = Grammars(tokenizer, vocab_size=259, eos_token_ids=(256,))

    def first(**options: Any) -> list[int]:
        grammar = grammars.compile(tools_grammar(TOOLS, REQUIRED, "mistral", **options))
        bits = np.unpackbits(np.frombuffer(grammar.matcher().compute_bitmask(), np.uint8), bitorder="little")
        return np.flatnonzero(bits).tolist()

    assert first() == [ord("[")]
    assert first(tokenizer=tokenizer) == [258]


@pytest.mark.parametrize(
    ("tools", "choice", "param", "message"),
    [
        ([], REQUIRED, "tools", "at least one"),
        ("f", REQUIRED, "tools", "list"),
        ([{}], REQUIRED, "tools", r"tools\[0\] must be an object"),
        ([{"type": "browser", "function": {"name": "f"}}], REQUIRED, "tools", "type 'function'"),
        ([tool("a b")], REQUIRED, "tools", r"tools\[0\].function.name"),
        ([tool('"x')], REQUIRED, "tools", "letters"),
        ([tool("f"), tool("f")], REQUIRED, "tools", "unique"),
        ([tool("f", [])], REQUIRED, "tools", "JSON schema"),
        ([tool("f", {"type": "string"})], REQUIRED, "tools", "type object"),
        ([tool(f"f{i}") for i in range(200)], REQUIRED, "tools", "at most 128"),
        (TOOLS, "auto", "tool_choice", "required"),
        (TOOLS, {"type": "function"}, "tool_choice", "required"),
        (TOOLS, {"type": "function", "function": {"name": "pong"}}, "tool_choice", "did you mean 'ping'"),
    ],
)
def test_invalid_tools_and_choices_are_refused(tools: Any, choice: Any, param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        tools_grammar(tools, choice, parser_for("hermes"))
    assert refused.value.param == param


def test_an_invalid_schema_is_refused_with_param_tools(llm: LLM) -> None:
    outputs = tools_grammar([tool("f", {"properties": {"a": {"type": "strin"}}})], REQUIRED, None)
    with pytest.raises(RequestError, match="strin") as refused:
        llm.generate("a", SamplingParams(structured_outputs=outputs), use_tqdm=False)
    assert refused.value.param == "tools"


def test_arguments_have_no_keys_that_the_schema_does_not_list() -> None:
    grammars = Grammars(byte_tokenizer(), vocab_size=258, eos_token_ids=(256,))
    grammar = grammars.compile(tools_grammar([tool("f", {"properties": {}})], REQUIRED, "llama3_json"))
    matcher = grammar.matcher()
    assert not matcher.consume_tokens(list(b'{"name": "f", "parameters": {"')), "a key was allowed"
    assert grammar.matcher().consume_tokens(list(b'{"name": "f", "parameters": {}}'))
