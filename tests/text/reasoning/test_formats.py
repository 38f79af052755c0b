"""Each reasoning format: answers as its models write them, split at every character."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.text.answer_parts import ContentDelta, ParsedAnswer, ReasoningDelta, parts_of, put_together
from headrace.text.answer_reader import AnswerReader
from headrace.text.reasoning.formats import FORMATS, check_reasoning_name, reasoning_format
from headrace.text.tool_calls import parser_for

HARMONY = "<|channel|>analysis<|message|>Let me\nsee.<|end|><|start|>assistant<|channel|>final<|message|>Rome."

# name, whether the prompt ended inside the reasoning, answer, reasoning, content
ANSWERS: list[tuple[str, bool | None, str, str, str]] = [
    ("qwen3", None, "<think>\nLet me\nsee.\n</think>\n\nRome. ", "Let me\nsee.", "Rome. "),
    ("qwen3", None, "<think>\n\n</think>\n\nRome.", "", "Rome."),
    ("qwen3", None, " Rome has no <think> tag.", "", " Rome has no <think> tag."),
    ("qwen3", None, "<think>\nLet me <b>se", "Let me <b>se", ""),
    ("qwen3", None, "<think>a < b </thin </think>c</think>d", "a < b </thin", "c</think>d"),
    ("qwen3", None, "<thin", "", "<thin"),
    ("qwen3", True, "\nLet me see.\n</think>\n\nRome.", "Let me see.", "Rome."),
    ("qwen3", True, "<think>\nLet me see.</think>Rome.", "Let me see.", "Rome."),
    ("qwen3", True, "</think>\n\nRome.", "", "Rome."),
    ("qwen3", True, "Let me", "Let me", ""),
    ("qwen3", False, "Rome. <think>", "", "Rome. <think>"),
    ("glm45", None, "\n<think>Let me see.</think>\nRome.", "Let me see.", "Rome."),
    ("deepseek_r1", None, "Let me see.\n</think>\n\nRome.", "Let me see.", "Rome."),
    ("deepseek_r1", None, "<think>\nLet me see.\n</think>\n\nRome.", "Let me see.", "Rome."),
    ("deepseek_v3", True, "Let me see.</think>Rome.", "Let me see.", "Rome."),
    ("deepseek_v3", False, "Rome.", "", "Rome."),
    ("seed_oss", None, "<seed:think>Let me see.</seed:think>Rome.", "Let me see.", "Rome."),
    ("ernie45", None, "Let me see.\n</think>\n\n<response>\nRome.\n</response>\n", "Let me see.", "Rome."),
    ("ernie45", None, "Let me see.\n</think>\n\nRome.", "Let me see.", "Rome."),
    ("ernie45", None, "Hm.</think><response>Ro</resp me.</response> or", "Hm.", "Ro</resp me.</response> or"),
    ("hunyuan_a13b", None, "<think>\nLet me see.\n</think>\n<answer>\nRome.\n</answer>", "Let me see.", "Rome."),
    ("granite", None, "Here is my thought process: See.\n\nHere is my response: Rome.", "See.", "Rome."),
    ("granite", None, "Here's my thought process:\nSee.\nHere's my response:\nRome.", "See.", "Rome."),
    ("granite", None, "<think>See.</think><response>Rome.</response>", "See.", "Rome."),
    ("granite", None, "Here is my thought", "", "Here is my thought"),
    ("granite", None, "Here is my answer: Rome.", "", "Here is my answer: Rome."),
    ("mistral", None, "[THINK]Let me see.[/THINK]Rome.", "Let me see.", "Rome."),
    ("mistral", None, "<think>\nLet me see.\n</think>\nRome.", "Let me see.", "Rome."),
    ("cohere_command3", None, "<|START_THINKING|>See.<|END_THINKING|><|START_RESPONSE|>Rome.<|END_RESPONSE|>", "See.",
        "Rome."),
    ("cohere_command3", None, "<|START_RESPONSE|>Rome.<|END_RESPONSE|>", "", "Rome."),
    ("openai_gptoss", None, HARMONY, "Let me\nsee.", "Rome."),
    ("openai_gptoss", None, HARMONY + "<|return|>", "Let me\nsee.", "Rome."),
    ("openai_gptoss", None, "<|channel|>final <|constrain|>json<|message|>{}", "", "{}"),
    ("openai_gptoss", None, "<|channel|>analysis<|message|>Let me", "Let me", ""),
    ("openai_gptoss", None, "Plain text.", "", "Plain text."),
    ("openai_gptoss", None, "<|channel|>ana", "", "<|channel|>ana"),
    ("openai_gptoss", None, ("<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B"
        "<|end|><|start|>assistant<|channel|>commentary<|message|>C<|end|><|start|>assistant<|channel|>final<|message|>D"),
        "A\nB", "C\nD"),
]  # fmt: skip


def read(name: str, pieces: list[str], is_inside: bool | None = None, tools: str | None = None) -> ParsedAnswer:
    kind = reasoning_format(name, None)
    assert kind is not None
    parser = None if tools is None else parser_for(tools, make_id=lambda: "id")
    reader = AnswerReader(kind(is_inside=is_inside, call_markers=parser.markers[:1] if parser else ()), parser)
    deltas = [delta for piece in pieces for delta in reader.read(piece)]
    return put_together([*deltas, *reader.read("", is_end=True)])


@pytest.mark.parametrize(("name", "is_inside", "text", "reasoning", "content"), ANSWERS)
def test_reasoning_is_separated_wherever_the_answer_is_split(
    name: str, is_inside: bool | None, text: str, reasoning: str, content: str
) -> None:
    expected = ParsedAnswer(content, (), reasoning)
    assert read(name, [text], is_inside) == expected
    assert read(name, list(text), is_inside) == expected
    for split in range(1, len(text)):
        assert read(name, [text[:split], text[split:]], is_inside) == expected, split


def test_every_format_is_tested() -> None:
    assert {name for name, *_ in ANSWERS} == {kind.name for kind in FORMATS}


@pytest.mark.parametrize(("name", "is_inside", "text", "reasoning", "content"), ANSWERS)
def test_a_stream_never_shows_a_part_of_a_tag(
    name: str, is_inside: bool | None, text: str, reasoning: str, content: str
) -> None:
    kind = reasoning_format(name, None)
    assert kind is not None
    parser = kind(is_inside=is_inside)
    shown = {ReasoningDelta: "", ContentDelta: ""}
    for char in text:
        for delta in parser.push(char):
            assert not isinstance(delta, tuple)
            shown[type(delta)] += delta.text  # type: ignore[union-attr, index]
        assert reasoning.startswith(shown[ReasoningDelta]) and content.startswith(shown[ContentDelta])


def test_reasoning_is_streamed_as_it_arrives() -> None:
    kind = reasoning_format("qwen3", None)
    assert kind is not None
    parser = kind()
    assert parser.push("<think>\nLet ") == [ReasoningDelta("Let")]
    assert parser.push("me </") == [ReasoningDelta(" me")]
    assert parser.push("b> see.\n") == [ReasoningDelta(" </b> see.")]
    assert parser.push("</think>\n\nRo") == [ContentDelta("Ro")]


FRAGMENTS = [
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<response>", "</response>", "Here is my ", "thought process:"),
    *("response:", "<|channel|>", "analysis", "final", "commentary", "<|message|>", "<|end|>", "<|start|>assistant"),
    *(" to=functions.f", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "{}"),
    *("<tool_call>", "a", " ", "\n", "<", "|", "<|call|>", "<answer>", "</answer>", "text"),
]


@given(
    st.sampled_from([kind.name for kind in FORMATS]),
    st.sampled_from([None, True, False]),
    st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    st.sampled_from([None, "hermes", "openai"]),
    st.data(),
)
@settings(max_examples=200)
def test_any_split_of_any_text_gives_the_same(
    name: str, is_inside: bool | None, parts: list[str], tools: str | None, data: st.DataObject
) -> None:
    text = "".join(parts)
    splits = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *splits, len(text)])]
    expected = read(name, [text], is_inside, tools)
    assert read(name, pieces, is_inside, tools) == expected
    assert read(name, list(text), is_inside, tools) == expected


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
HARMONY_CALL = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("name", "tools", "text", "reasoning"),
    [
        ("qwen3", "hermes", f"<think>\nSee.\n</think>\n\n{CALL}", "See."),
        ("qwen3", "hermes", f"<think>\nSee.\n{CALL}", "See."),
        ("deepseek_r1", "hermes", CALL, ""),
        ("mistral", "mistral", '[THINK]See.[/THINK][TOOL_CALLS]f[ARGS]{"x": 1}', "See."),
        ("openai_gptoss", "openai", f'<|channel|>analysis<|message|>See.<|end|>{HARMONY_CALL}{{"x": 1}}', "See."),
        ("openai_gptoss", "openai", f'{HARMONY_CALL.removeprefix("<|start|>assistant")}{{"x": 1}}<|call|>', ""),
        ("openai_gptoss", "openai", ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>', ""),
        ("cohere_command3", "cohere_command3", ('<|START_THINKING|>See.<|END_THINKING|><|START_ACTION|>\n'
            '[{"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}}]\n<|END_ACTION|>'), "See."),
    ],
)  # fmt: skip
def test_calls_after_reasoning_are_read(name: str, tools: str, text: str, reasoning: str) -> None:
    for pieces in ([text], list(text), *([text[:i], text[i:]] for i in range(len(text)))):
        answer = read(name, pieces, tools=tools)
        assert (answer.reasoning, answer.content) == (reasoning, "")
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [("f", '{"x": 1}')]


def test_parts_come_in_the_order_of_the_answer() -> None:
    kind = reasoning_format("qwen3", None)
    assert kind is not None
    reader = AnswerReader(kind(), parser_for("hermes", make_id=lambda: "id"))
    parts = parts_of(reader.read(f"<think>See.</think>First.\n{CALL} Then.", is_end=True))
    assert [type(part).__name__ for part in parts] == ["ReasoningPart", "TextPart", "ToolCall", "TextPart"]


@pytest.mark.parametrize(
    ("name", "prompt", "state"),
    [
        ("qwen3", "<|im_start|>assistant\n", None),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("qwen3", "What is <think>?<|im_end|>\n<|im_start|>assistant\n", None),
        ("deepseek_r1", "<｜Assistant｜><think>\n", True),
        ("deepseek_v3", "<｜Assistant｜></think>", False),
        ("openai_gptoss", "<|start|>assistant", None),
    ],
)
def test_the_end_of_the_prompt_tells_where_the_answer_starts(name: str, prompt: str, state: bool | None) -> None:
    kind = reasoning_format(name, None)
    assert kind is not None and kind.state_after(prompt) is state


def test_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(
        ConfigError, match=r"reasoning_parser 'qwen4' is unknown, did you mean 'qwen3'.*auto, none, .*mistral"
    ):
        check_reasoning_name("qwen4")
    for name in ("auto", "none", "deepseek_r1", "gpt_oss", "glm45", "granite"):
        check_reasoning_name(name)


def test_none_leaves_the_text_as_it_is() -> None:
    assert reasoning_format("none", "{{ '<think></think>' }}") is None
    assert reasoning_format("auto", None) is None
