"""Forced tool calls that `max_tokens` cuts short, whole and in chunks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.openai.tool_use import ToolCalls
from headrace.text.tool_calls import put_together

WHOLE = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Rome"}}',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]',
    "granite": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}]',
    "cohere_command3": '<|START_ACTION|>[{"tool_name": "weather", "parameters": {"city": "Rome"}}]<|END_ACTION|>',
    "deepseek_v31": '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>',
    "kimi_k2": '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|>',
    "openai": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
    "pythonic": '[weather(city="Rome")]',
}
TYPES = {"weather": {"city": ("string",)}}


def calls_of(message: Any) -> list[tuple[str, str]]:
    if not message.more:
        return []
    found = json.loads(b"{" + message.more[1:] + b"}")["tool_calls"]
    return [(call["function"]["name"], call["function"]["arguments"]) for call in found]


@pytest.mark.parametrize("parser", WHOLE)
def test_a_forced_call_is_a_call_wherever_it_is_cut(parser: str) -> None:
    calls = ToolCalls(parser, ("weather",), is_forced=True, types=TYPES)
    whole = '{"city": "Rome"}'
    for length in range(1, len(WHOLE[parser]) + 1):
        message = calls.message(WHOLE[parser][:length], "length")
        ((name, arguments),) = calls_of(message)
        assert name == "weather" and whole.startswith(arguments), (length, arguments)
        assert (message.content, message.finish_reason) == (None, "length"), length


def test_an_answer_that_ends_before_a_forced_call_has_none() -> None:
    message = ToolCalls("hermes", ("weather",), is_forced=True).message("", "length")
    assert (message.content, message.finish_reason, message.more) == ("", "length", b"")


@pytest.mark.parametrize("parser", WHOLE)
def test_a_forced_call_is_the_same_in_chunks(parser: str) -> None:
    calls = ToolCalls(parser, ("weather", "age"), is_forced=True, types=TYPES)
    for length in range(len(WHOLE[parser]) + 1):
        text = WHOLE[parser][:length]
        stream = calls.parser()
        deltas = [delta for character in text for delta in calls.read(stream, character, is_end=False)]
        parsed = put_together([*deltas, *calls.read(stream, "", is_end=True)])
        whole = calls.message(text, "length")
        assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls_of(whole), length
        assert (parsed.content or None) == (whole.content or None), length


@pytest.mark.parametrize(
    "text, name",
    [('<tool_call>\n{"name": "wea', "weather"), ('<tool_call>\n{"name": "w', None), ('<tool_call>\n{"na', None)],
)
def test_a_forced_call_is_text_if_its_name_is_not_known(text: str, name: str | None) -> None:
    message = ToolCalls("hermes", ("weather", "wind"), is_forced=True).message(text, "length")
    assert calls_of(message) == ([] if name is None else [(name, "")])
    assert message.content == (text if name is None else None)


@pytest.mark.parametrize(
    "rest, names", [('\n<tool_call>\n{"name": "wind", "ar', ["weather", "wind"]), ('\n<tool_call>\n{"nam', ["weather"])]
)
def test_a_second_forced_call_is_a_call_once_its_name_is_there(rest: str, names: list[str]) -> None:
    message = ToolCalls("hermes", ("weather", "wind"), is_forced=True).message(WHOLE["hermes"] + rest, "length")
    assert [name for name, _ in calls_of(message)] == names
    assert message.content is None


def test_a_call_that_was_not_forced_is_text_if_it_is_cut() -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"ci'
    message = ToolCalls("hermes", ("weather",)).message(text, "length")
    assert (message.content, message.finish_reason, message.more) == (text, "length", b"")
