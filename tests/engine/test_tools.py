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
from headrace.text.tools.calls import parameter_types
from headrace.text.tools.grammar import MAX_CALLS, tools_grammar
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


TYPES = {name: parameter_types(schema) for name, schema in SCHEMAS.items()}
ON_A_MODEL = ["hermes", "llama3_json", "mistral"]


@pytest.mark.parametrize("name", ON_A_MODEL)
@pytest.mark.parametrize("tool_choice", [REQUIRED, NAMED], ids=["required", "named"])
def test_a_forced_answer_parses_as_calls_with_valid_arguments(llm: LLM, name: str, tool_choice: Any) -> None:
    outputs = tools_grammar(TOOLS, tool_choice, name, parallel_tool_calls=False)
    params = SamplingParams(max_tokens=300, seed=1, n=4, structured_outputs=outputs)
    (output,) = llm.generate("a", params, use_tqdm=False)
    for answer in output.outputs:
        assert answer.finish_reason == "stop"
        found = parse(answer.text, name, TYPES)
        assert found.content == "" and len(found.tool_calls) == 1
        (call,) = found.tool_calls
        assert fits(json.loads(call.arguments), SCHEMAS[call.name])
        assert tool_choice == REQUIRED or call.name == "set-level.2"


@pytest.mark.parametrize("name", ON_A_MODEL)
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


def walks(name: str, tools: Any, choice: Any, *, num: int, is_parallel: bool = True, answer: Any = None) -> list[str]:
    """Texts that a format's grammar allows, by a random choice among the bytes that it allows next."""
    grammars = Grammars(byte_tokenizer(), vocab_size=258, eos_token_ids=(256,))
    outputs = tools_grammar(tools, choice, name, parallel_tool_calls=is_parallel, answer=answer)
    grammar = grammars.compile(outputs)
    rng = np.random.default_rng(7)
    found = [_walk(grammar.matcher(), rng, grammars.end_id) for _ in range(num)]
    return [text for text in found if text is not None and "analysis" not in text]  # which has no end here


def _walk(matcher: Any, rng: np.random.Generator, end_id: int) -> str | None:
    text = b""
    while len(text) < 1_500:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        if allowed[-1] == end_id and (len(allowed) == 1 or rng.random() < 0.3):
            return text.decode()
        token = int(rng.choice(allowed[allowed < 256]))
        assert matcher.consume_token(token)
        text += bytes([token])
    return None


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_every_grammar_allows_what_its_parser_reads_and_nothing_else(name: str) -> None:
    for choice in (REQUIRED, NAMED):
        texts = walks(name, TOOLS, choice, num=8, is_parallel=False)
        assert texts
        for text in texts:
            found = parse(text, name, TYPES)
            assert (found.content, len(found.tool_calls)) == ("", 1), text
            (call,) = found.tool_calls
            assert fits(json.loads(call.arguments), SCHEMAS[call.name]), text
            assert choice == REQUIRED or call.name == "set-level.2"


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_every_grammar_allows_several_calls_except_that_of_gpt_oss(name: str) -> None:
    numbers = []
    for text in walks(name, [tool("ping")], REQUIRED, num=12):
        found = parse(text, name)
        assert found.content == "" and {call.name for call in found.tool_calls} == {"ping"}, text
        numbers.append(len(found.tool_calls))
    assert (max(numbers) > 1) == (name != "openai") and max(numbers) <= MAX_CALLS


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


@pytest.mark.parametrize("name", [name for name in PARSERS if name != "openai"])
def test_with_a_schema_an_answer_is_calls_or_such_a_json_text(name: str) -> None:
    schema = record(level={"type": "integer", "minimum": 1, "maximum": 3})
    kinds = set()
    for text in walks(name, [tool("ping")], REQUIRED, num=12, is_parallel=False, answer=schema):
        found = parse(text, name, {"ping": {}})
        kinds.add(bool(found.tool_calls))
        assert found.tool_calls or fits(json.loads(found.content), schema), text
    assert kinds == {True, False}
