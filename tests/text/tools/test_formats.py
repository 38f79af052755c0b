"""Each format of tool calls: answers as its models write them, split at every character."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.answer_parts import ContentDelta, ParsedAnswer, ToolCallDelta, put_together
from headrace.text.tool_calls import PARSERS, parse, parser_for
from headrace.text.tools.calls import parameter_types

SCHEMA = {
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "ratio": {"type": "number"},
        "dry": {"type": "boolean"},
        "tags": {"type": "array"},
        "where": {"$ref": "#/$defs/place"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "level": {"type": ["integer", "null"]},
        "code": {"type": "string"},
    },
    "$defs": {"place": {"type": "object"}},
}
TYPES = {"weather": parameter_types(SCHEMA), "ping": {}, "get-time.2": {"zone": ("string",)}}

ROME: dict[str, Any] = {"city": "Rome", "days": 3}
QUOTED: dict[str, Any] = {"city": 'Sao "Paulo"\n\\ 日本 <b>', "where": {"x": [1, {"y": None}]}}
CALLS = [[("weather", ROME)], [("weather", ROME), ("ping", {})], [("weather", QUOTED), ("get-time.2", {"zone": "CET"})]]


def j(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def tags(arguments: dict[str, Any], before: str, after: str) -> str:
    """Text stands bare between tags, everything else as JSON."""
    values = {key: value if isinstance(value, str) else j(value) for key, value in arguments.items()}
    return "".join(f"{before.format(key)}{value}{after}" for key, value in values.items())


def python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def objects(calls: list[tuple[str, Any]], key: str = "arguments") -> str:
    return j([{"name": name, key: arguments} for name, arguments in calls])


WRITE: dict[str, Any] = {
    "hermes": lambda calls: "\n".join(
        f"<tool_call>\n{j({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls
    ),
    "longcat": lambda calls: "\n".join(
        f"<longcat_tool_call>{j({'name': name, 'arguments': arguments})}</longcat_tool_call>"
        for name, arguments in calls
    ),
    "internlm": lambda calls: "\n".join(
        f"<|action_start|><|plugin|>\n{j({'name': name, 'parameters': arguments})}<|action_end|>"
        for name, arguments in calls
    ),
    "llama3_json": lambda calls: "; ".join(j({"name": name, "parameters": arguments}) for name, arguments in calls),
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{j(arguments)}" for name, arguments in calls),
    "granite": lambda calls: f"<|tool_call|>{objects(calls)}",
    "jamba": lambda calls: f"<tool_calls>{objects(calls)}</tool_calls>",
    "nemotron_json": lambda calls: f"<TOOLCALL>{objects(calls)}</TOOLCALL>",
    "phi4_mini_json": lambda calls: f"functools{objects(calls)}",
    "xlam": objects,
    "cohere_command3": lambda calls: "<|START_ACTION|>{}<|END_ACTION|>".format(
        j([
            {"tool_call_id": str(i), "tool_name": name, "parameters": arguments}
            for i, (name, arguments) in enumerate(calls)
        ])
    ),
    "deepseek_v3": lambda calls: "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>".format(
        "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{j(arguments)}\n```<｜tool▁call▁end｜>"
            for name, arguments in calls
        )
    ),
    "deepseek_v31": lambda calls: "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>".format(
        "".join(
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{j(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls
        )
    ),
    "kimi_k2": lambda calls: "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>".format(
        "".join(
            f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{j(arguments)}<|tool_call_end|>"
            for i, (name, arguments) in enumerate(calls)
        )
    ),
    "openai": lambda calls: "".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{j(arguments)}<|call|>"
        for name, arguments in calls
    ),
    "qwen3_coder": lambda calls: "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + tags(arguments, "<parameter={}>\n", "\n</parameter>\n")
        + "</function>\n</tool_call>"
        for name, arguments in calls
    ),
    "seed_oss": lambda calls: "\n".join(
        f"<seed:tool_call>\n<function={name}>\n"
        + tags(arguments, "<parameter={}>", "</parameter>\n")
        + "</function>\n</seed:tool_call>"
        for name, arguments in calls
    ),
    "glm45": lambda calls: "\n".join(
        f"<tool_call>{name}\n"
        + tags(arguments, "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n")
        + "</tool_call>"
        for name, arguments in calls
    ),
    "minimax_m2": lambda calls: "<minimax:tool_call>\n{}</minimax:tool_call>".format(
        "".join(
            f'<invoke name="{name}">\n' + tags(arguments, '<parameter name="{}">', "</parameter>\n") + "</invoke>\n"
            for name, arguments in calls
        )
    ),
    "deepseek_v32": lambda calls: "<｜DSML｜function_calls>\n{}</｜DSML｜function_calls>".format(
        "".join(
            f'<｜DSML｜invoke name="{name}">\n'
            + tags(arguments, '<｜DSML｜parameter name="{}">', "</｜DSML｜parameter>\n")
            + "</｜DSML｜invoke>\n"
            for name, arguments in calls
        )
    ),
    "pythonic": lambda calls: f"[{', '.join(python(*call) for call in calls)}]",
    "llama4_pythonic": lambda calls: (
        f"<|python_start|>[{', '.join(python(*call) for call in calls)}]<|python_end|>"
    ),
    "lfm2": lambda calls: f"<|tool_call_start|>[{', '.join(python(*call) for call in calls)}]<|tool_call_end|>",
    "olmo3": lambda calls: "<function_calls>\n{}\n</function_calls>".format("\n".join(python(*c) for c in calls)),
}  # fmt: skip
ONLY_AT_START = {"llama3_json", "pythonic", "llama4_pythonic", "xlam"}


def read(name: str, pieces: list[str], **options: Any) -> ParsedAnswer:
    parser = parser_for(name, TYPES, make_id=lambda: "id", **options)
    return put_together([*(delta for piece in pieces for delta in parser.push(piece)), *parser.finish()])


def found(answer: ParsedAnswer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]


def test_every_format_is_tested() -> None:
    assert set(WRITE) == set(PARSERS)


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_calls_are_read_wherever_the_answer_is_split(name: str) -> None:
    for calls in CALLS:
        text = WRITE[name](calls) if name in ONLY_AT_START else f"I will look.\n\n{WRITE[name](calls)}"
        whole = read(name, [text], whole_calls=True)
        assert found(whole) == calls
        assert whole.content == ("" if name in ONLY_AT_START else "I will look.")
        for split in range(len(text) + 1):
            assert read(name, [text[:split], text[split:]]) == whole, split
        assert read(name, list(text)) == whole


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_what_is_shown_of_a_stream_never_has_a_part_of_a_call(name: str) -> None:
    """Whatever has arrived so far, the text shown is that of the whole answer."""
    if name in ONLY_AT_START:
        pytest.skip("the answer is the call")
    text = "Hm < 5.\n" + WRITE[name](CALLS[1])
    parser = parser_for(name, TYPES)
    shown = "".join(delta.text for char in text for delta in parser.push(char) if isinstance(delta, ContentDelta))
    assert shown == "Hm < 5."


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_arguments_are_streamed_in_several_deltas(name: str) -> None:
    text = WRITE[name]([("weather", ROME)])
    parser = parser_for(name, TYPES)
    deltas = [delta for char in text for delta in parser.push(char)] + parser.finish()
    arguments = [delta.arguments for delta in deltas if isinstance(delta, ToolCallDelta) and delta.arguments]
    assert len(arguments) >= 3 and json.loads("".join(arguments)) == ROME


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_an_answer_that_breaks_off_anywhere_gives_no_false_call_and_loses_nothing(name: str) -> None:
    text = WRITE[name](CALLS[1])
    for length in range(len(text)):
        answer = read(name, [text[:length]], whole_calls=True)
        assert found(answer) in ([], CALLS[0], CALLS[1])
        if not answer.tool_calls:
            assert answer.content == text[:length]
        read(name, list(text[:length]))  # never raises


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_a_call_of_an_unknown_tool_is_text(name: str) -> None:
    text = WRITE[name]([("unknown", {"city": "Rome"})])
    assert parse(text, name, ["weather"]) == ParsedAnswer(text, ())


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=weather>", "<parameter=city>", "</parameter>", "</function>"),
    *("<arg_key>city</arg_key>", "<arg_value>", "</arg_value>", "weather", "ping", "weather(", "city=", "'x'", ")"),
    *("<|tool_call|>", "[", "]", '{"name": "ping", "arguments": {}}', "{}", ",", "\n", " ", "<", '"', "'", "\\"),
    *("<|channel|>commentary to=functions.ping", "<|message|>", "<|call|>", "functions.ping:0", "<｜tool▁sep｜>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "```json\n", "```", "function"),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *('<invoke name="ping">', "</invoke>", "<minimax:tool_call>", "<|START_ACTION|>", "Action: ```json\n", "5"),
    *("<function_calls>", "</function_calls>", "<|python_start|>", "<|tool_call_start|>", "functools", "<seed:tool_c"),
]


@given(st.sampled_from(sorted(PARSERS)), st.lists(st.sampled_from(FRAGMENTS), max_size=14), st.booleans(), st.data())
@settings(max_examples=200)
def test_any_split_of_any_text_gives_the_same(
    name: str, parts: list[str], whole_calls: bool, data: st.DataObject
) -> None:
    text = "".join(parts)
    splits = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *splits, len(text)])]
    expected = read(name, [text], whole_calls=whole_calls)
    assert read(name, pieces, whole_calls=whole_calls) == expected
    assert read(name, list(text), whole_calls=whole_calls) == expected
    if whole_calls and not expected.tool_calls:
        assert expected.content == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Rome", "Rome"), ("", ""), ("3", "3"), ("null", "null"), ("\n two\nlines \n", " two\nlines "),
        ("a</parameter", "a</parameter"), ("<parameter=x>", "<parameter=x>"), ("\n", ""), ("\n\n\n", "\n"),
    ],
)  # fmt: skip
def test_a_parameter_that_is_text_is_taken_as_it_stands(text: str, value: str) -> None:
    answer = f"<tool_call>\n<function=weather>\n<parameter=code>{text}</parameter>\n</function>\n</tool_call>"
    for pieces in ([answer], list(answer)):
        assert found(read("qwen3_coder", pieces)) == [("weather", {"code": value})]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("days", "3", 3), ("days", " 3\n", 3), ("days", "three", "three"), ("days", "3.5", "3.5"), ("ratio", "3", 3),
        ("ratio", "-2e3", -2000.0), ("dry", "true", True), ("dry", "True", True), ("dry", "1", "1"),
        ("tags", '["a", 1]', ["a", 1]), ("tags", "['a', None]", ["a", None]), ("where", '{"x": {}}', {"x": {}}),
        ("note", "null", None), ("note", "5", "5"), ("note", "some text", "some text"), ("level", "None", None),
        ("level", "7", 7), ("other", "5", 5), ("other", "five", "five"), ("other", "NaN", "NaN"), ("tags", "[1", "[1"),
    ],
)  # fmt: skip
def test_other_parameters_become_what_their_type_says(key: str, text: str, value: Any) -> None:
    answer = f"<tool_call>weather\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    assert found(read("glm45", list(answer))) == [("weather", {key: value})]


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("qwen3_coder", "<function=ping>\n</function>\n</tool_call>", [("ping", {})]),
        ("qwen3_coder", "<tool_call>\n<function=ping>\n</function>", [("ping", {})]),
        ("qwen3_coder", f"<tool_call>{'<function=ping></function>' * 2}</tool_call>", [("ping", {})] * 2),
        ("glm45", "<tool_call>ping</tool_call>", [("ping", {})]),
        ("glm45", "<tool_call>ping\n</tool_call>\n<tool_call>ping</tool_call>", [("ping", {})] * 2),
        ("mistral", '[TOOL_CALLS] [{"name": "ping", "arguments": {}}]', [("ping", {})]),
        ("cohere_command3", 'Action: ```json\n[{"tool_name": "ping", "parameters": {}}]\n```', [("ping", {})]),
        ("granite", '<tool_call>[{"name": "ping", "arguments": {}}]', [("ping", {})]),
        ("kimi_k2", "<|tool_call_begin|>ping:3<|tool_call_argument_begin|>{}<|tool_call_end|>", [("ping", {})]),
        ("openai", "<|channel|>commentary to=functions.ping json<|message|>{}", [("ping", {})]),
        ("openai", "<|channel|>analysis to=functions.ping <|constrain|>json<|message|>{}", [("ping", {})]),
        ("xlam", '```json\n[{"name": "ping", "arguments": {}}]\n```', [("ping", {})]),
        ("phi4_mini_json", '<|tool_call|>[{"name": "ping", "arguments": {}}]<|/tool_call|>', [("ping", {})]),
        ("llama4_pythonic", "[ping()]", [("ping", {})]),
        ("pythonic", "[weather(city='a', dry=true, level=None, tags=[1, (2,)])]",
            [("weather", {"city": "a", "dry": True, "level": None, "tags": [1, [2]]})]),
        ("deepseek_v32", ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="days" '
            'string="true">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'),
            [("weather", {"days": "3"})]),
    ],
)  # fmt: skip
def test_variants_that_models_write_are_read(name: str, text: str, calls: list[tuple[str, Any]]) -> None:
    for pieces in ([text], list(text)):
        answer = read(name, pieces)
        assert (found(answer), answer.content) == (calls, "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", "[weather(city=open('x'))]"), ("pythonic", "[1, 2]"), ("pythonic", "weather(city='a')"),
        ("pythonic", "[weather('a')]"), ("pythonic", "[weather(city=f'{x}')]"), ("pythonic", "[weather(**{})]"),
        ("pythonic", "[weather(city='a', city='b')]"), ("glm45", "<tool_call>two words</tool_call>"),
        ("qwen3_coder", "<tool_call>{}</tool_call>"), ("qwen3_coder", "<function=ping><b></function>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>nothing"), ("openai", "<|channel|>final<|message|>{}"),
        ("cohere_command3", "<|START_ACTION|>[{]<|END_ACTION|>"), ("olmo3", "<function_calls>\n</function_calls>"),
    ],
)  # fmt: skip
def test_broken_calls_are_text_to_the_last_character(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert read(name, pieces, whole_calls=True) == ParsedAnswer(text, ())
