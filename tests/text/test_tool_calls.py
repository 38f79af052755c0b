"""Tool calls parsed from text, however the text is split."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import RequestError
from headrace.text.tool_calls import (
    PARSERS,
    ContentDelta,
    Delta,
    ParsedAnswer,
    ToolCall,
    ToolCallDelta,
    parse,
    parser_for,
    put_together,
)

HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}\n</tool_call>'


def run(name: str, pieces: list[str], **options: Any) -> list[Delta]:
    numbers = itertools.count()
    parser = parser_for(name, make_id=lambda: f"id{next(numbers)}", **options)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return deltas + parser.finish()


def whole(name: str, text: str, **options: Any) -> ParsedAnswer:
    return put_together(run(name, [text], **options))


def calls_of(name: str, text: str, **options: Any) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in whole(name, text, **options).tool_calls]


# name of the parser, text, content, calls
GOOD = [
    ("hermes", HERMES_CALL, "", [("add", '{"a": 1, "b": [2, "}"]}')]),
    ("hermes", f"Let me see.\n{HERMES_CALL}\n{HERMES_CALL}\n", "Let me see.", [("add", '{"a": 1, "b": [2, "}"]}')] * 2),
    ("hermes", f"{HERMES_CALL}\n\nDone. ", "\n\nDone. ", [("add", '{"a": 1, "b": [2, "}"]}')]),
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", '{"x": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}', "", [("f", '{"x": 1}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "日本", "arguments": {"é": "\\u00e9"}}', "", [("日本", '{"é": "\\u00e9"}')]),
    ("llama3_json", '{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
    ("llama3_json", ' \n{"name": "f", "arguments": {}}\n', "", [("f", "{}")]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    (
        "llama3_json",
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": {}}}',
        "",
        [("f", "{}"), ("g", '{"a": {}}')],
    ),
    ("llama3_json", '{"name": "f", "parameters": {}} and so on', " and so on", [("f", "{}")]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}, "id": "abc123def"}]',
        "",
        [("f", '{"x": 1}'), ("g", "{}")],
    ),
    (
        "mistral",
        'Sure.[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g{"y": 2}',
        "Sure.",
        [("f", '{"x": 1}'), ("g", '{"y": 2}')],
    ),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"x": 1}', "", [("f", '{"x": 1}')]),
]
# No calls: all of it is text.
TEXTS = [
    ("hermes", "Nothing to call here."),
    ("hermes", "  spaces  \n"),
    ("hermes", "a < b, <tool>, <tool_cal"),
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call> not JSON </tool_call>"),
    ("hermes", '<tool_call>{"nam": "f", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{"}</tool_call>'),
    ("hermes", '<tool_call>["f"]</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "argum'),
    ("hermes", '{"name": "f", "arguments": {}}'),
    ("llama3_json", "Hello {you}"),
    ("llama3_json", '{"name": "Bob", "age": 5}'),
    ("llama3_json", '{"name": "Bob"}'),
    ("llama3_json", '{"temperature": 20}'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("llama3_json", "<|python_tag|> "),
    ("llama3_json", 'Call {"name": "f", "parameters": {}}'),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS] I would say so."),
    ("mistral", "[TOOL_CALLS] [1]"),
    ("mistral", "[TOOL_CALLS]name [ARGS"),
    ("mistral", "an [TOOL list"),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), GOOD)
def test_calls_are_told_apart_from_text(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for whole_calls in (False, True):
        found = whole(name, text, whole_calls=whole_calls)
        assert found.content == content
        assert [(call.name, call.arguments) for call in found.tool_calls] == calls


@pytest.mark.parametrize(("name", "text"), TEXTS)
@pytest.mark.parametrize("whole_calls", [False, True])
def test_what_is_no_call_is_text_to_the_last_character(name: str, text: str, whole_calls: bool) -> None:
    found = whole(name, text, whole_calls=whole_calls)
    assert found == ParsedAnswer(text, ())


ALL_TEXTS = [(name, text) for name, text, *_ in GOOD] + TEXTS
PIECES = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "f", ', '"arguments": ',
    '"parameters": ', '{"x": 1}', "{", "}", "[", "]", ",", ";", " ", "\n", '"', "f", "a word", "<", "\\",
]  # fmt: skip


@given(st.sampled_from(sorted(PARSERS)), st.lists(st.sampled_from(PIECES), max_size=12), st.booleans(), st.data())
@settings(max_examples=200)
def test_any_split_gives_the_same(name: str, parts: list[str], whole_calls: bool, data: st.DataObject) -> None:
    text = "".join(parts)
    splits = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *splits, len(text)])]
    expected = whole(name, text, whole_calls=whole_calls)
    assert put_together(run(name, pieces, whole_calls=whole_calls)) == expected
    assert put_together(run(name, list(text), whole_calls=whole_calls)) == expected


@pytest.mark.parametrize(("name", "text"), ALL_TEXTS)
def test_one_character_at_a_time_gives_the_same(name: str, text: str) -> None:
    for whole_calls in (False, True):
        once = whole(name, text, whole_calls=whole_calls)
        assert put_together(run(name, list(text), whole_calls=whole_calls)) == once
        for split in range(len(text)):
            assert put_together(run(name, [text[:split], text[split:]], whole_calls=whole_calls)) == once


@given(st.sampled_from(sorted(PARSERS)), st.lists(st.sampled_from(PIECES), max_size=12))
@settings(max_examples=300)
def test_no_text_is_lost(name: str, parts: list[str]) -> None:
    """Everything except white space is in the content, or in a call that was announced whole."""
    text = "".join(parts)
    found = whole(name, text, whole_calls=True)
    if not found.tool_calls:
        assert found.content == text
    else:
        assert all(json.loads(call.arguments) is not None for call in found.tool_calls)
        rest = iter(text)
        assert all(char in rest for char in found.content), "not a part of the text, in its order"


def test_a_stream_announces_a_call_and_then_brings_its_arguments() -> None:
    pieces = ["Wait", "\n<tool", '_call>{"name": "f"', ', "arguments": {"x"', ": 1", "}", "}</tool_call>"]
    assert run("hermes", pieces) == [
        ContentDelta("Wait"),
        ToolCallDelta(0, "id0", "f"),
        ToolCallDelta(0, arguments='{"x"'),
        ToolCallDelta(0, arguments=": 1"),
        ToolCallDelta(0, arguments="}"),
    ]


def test_calls_are_numbered() -> None:
    deltas = run("hermes", [HERMES_CALL + HERMES_CALL])
    assert [(delta.index, delta.id) for delta in deltas if isinstance(delta, ToolCallDelta) and delta.name] == [
        (0, "id0"),
        (1, "id1"),
    ]


def test_text_is_not_held_back_longer_than_it_may_be_a_marker() -> None:
    parser = parser_for("hermes")
    assert parser.push("one <tool") == [ContentDelta("one")]
    assert parser.push("s> two") == [ContentDelta(" <tools> two")]


def test_a_call_that_breaks_off_stays_as_far_as_it_arrived_in_a_stream_and_is_text_otherwise() -> None:
    truncated = '<tool_call>{"name": "f", "arguments": {"x": "a long te'
    assert whole("hermes", truncated) == ParsedAnswer("", (ToolCall("id0", "f", '{"x": "a long te'),))
    assert parse(truncated, "hermes") == ParsedAnswer(truncated, ())
    broken = '<tool_call>{"name": "f", "arguments": {"x": 1}, "more": 2} text'
    assert whole("hermes", broken) == ParsedAnswer(', "more": 2} text', (ToolCall("id0", "f", '{"x": 1}'),))
    assert parse(broken, "hermes") == ParsedAnswer(broken, ())


def test_a_call_of_an_unknown_tool_is_text() -> None:
    text = '{"name": "g", "parameters": {}}'
    assert calls_of("llama3_json", text, tools=["g"]) == [("g", "{}")]
    assert whole("llama3_json", text, tools=["f"]) == ParsedAnswer(text, ())
    other = '<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>'
    assert whole("hermes", other, tools=["f"]) == ParsedAnswer(other, ())


def test_an_id_that_the_model_gave_before_the_arguments_is_kept() -> None:
    text = '[TOOL_CALLS] [{"id": "abc123def", "name": "f", "arguments": {}}]'
    assert parse(text, "mistral").tool_calls == (ToolCall("abc123def", "f", "{}"),)
    assert parse("[TOOL_CALLS]f[CALL_ID]xyz[ARGS]{}", "mistral").tool_calls[0].id == "xyz"


def test_ids_are_new_each_time() -> None:
    ids = {call.id for call in parse(HERMES_CALL * 20, None).tool_calls}
    assert len(ids) == 20 and all(each.startswith("call_") for each in ids)


@pytest.mark.parametrize(
    ("given_name", "expected"),
    [
        ("hermes", "hermes"),
        ("qwen", "hermes"),
        ("llama3", "llama3_json"),
        ("mistral", "mistral"),
        (None, "hermes"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "hermes"),
        ("{%- if tools %}<tool_call></tool_call>{% endif %}", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ("{{ '<|start_header_id|>' }}{% if tools %}{% endif %}", "llama3_json"),
    ],
)
def test_a_parser_is_chosen_by_name_or_template(given_name: str | None, expected: str) -> None:
    assert parser_for(given_name).name == expected


def test_an_unknown_parser_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"'hermez', did you mean 'hermes'\?; known are .*hermes"):
        parser_for("hermez")
