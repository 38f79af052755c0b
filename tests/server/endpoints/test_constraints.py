"""Structured outputs and tool calls through the OpenAI client."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.server.options import ServerOptions
from tests.engine.tiny import save_tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.serving import MODEL, Server, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
ASK: dict[str, Any] = {"model": MODEL, "messages": MESSAGES}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Bern", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}},
        {"type": "json_object", "schema": SCHEMA},
    ],
)
def test_an_answer_follows_its_json_schema(client: openai.OpenAI, form: Any, seed: int) -> None:
    answer = client.chat.completions.create(**ASK, response_format=form, seed=seed, max_tokens=200)
    person = json.loads(answer.choices[0].message.content or "")
    assert person.keys() == {"name", "age"} and 0 <= person["age"] <= 9
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"regex": "[ab]{3}-[0-9]+!"}, r"[ab]{3}-[0-9]+!"),
        ({"choice": ["red", "green"]}, "red|green"),
        ({"grammar": 'start: "x" ("y" | "z") "!"'}, "x[yz]!"),
    ],
)
def test_an_answer_follows_its_regex_choice_or_grammar(server: Server, given: dict[str, Any], pattern: str) -> None:
    for path, body in ((CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": "hi"})):
        asked = {**body, "structured_outputs": given, "seed": 2, "max_tokens": 300}
        choice = server.post(path, asked).json()["choices"][0]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert re.fullmatch(pattern, text) and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("given", "pattern"), [({"regex": "[ab]{3}"}, "[ab]{3}"), ({"ebnf": 'root ::= "x" [yz]'}, "x[yz]")]
)
def test_an_answer_follows_what_sglang_calls_its_form(server: Server, given: dict[str, str], pattern: str) -> None:
    for path, body in ((CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": "hi"})):
        choice = server.post(path, {**body, **given, "seed": 2, "max_tokens": 300}).json()["choices"][0]
        assert re.fullmatch(pattern, choice["message"]["content"] if path == CHAT else choice["text"])
    assert (
        "only one of"
        in server.error(CHAT, {"messages": MESSAGES, "regex": "a", "structured_outputs": {"regex": "b"}})["message"]
    )


def test_a_response_follows_its_json_schema(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}}
    response = client.responses.create(model=MODEL, input="hi", text=form, extra_body={"seed": 1})
    assert json.loads(response.output_text).keys() == {"name", "age"}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wrong"}}}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs"),
    ],
)
def test_an_invalid_constraint_is_refused(server: Server, more: dict[str, Any], param: str) -> None:
    assert server.error(CHAT, {"messages": MESSAGES, **more})["param"] == param


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{}]}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tool_choice"),
        ({"tools": [WEATHER], "structured_outputs": {"regex": "a"}}, "tools"),
    ],
)
def test_bad_tools_are_refused(server: Server, more: dict[str, Any], param: str) -> None:
    assert server.error(CHAT, {"messages": MESSAGES, **more})["param"] == param


@pytest.mark.parametrize("seed", range(2))
def test_a_required_call_is_made(client: openai.OpenAI, seed: int) -> None:
    tools: Any = [WEATHER, CLOCK]
    asked = {**ASK, "tools": tools, "tool_choice": "required", "seed": seed, "max_tokens": 400}
    (choice,) = client.chat.completions.create(**asked, parallel_tool_calls=False).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name in ("weather", "clock") and call.id.startswith("call_")
    json.loads(call.function.arguments)


def test_a_named_call_is_made_and_streams_to_the_same(client: openai.OpenAI) -> None:
    tools: Any = [WEATHER, CLOCK]
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    asked = {**ASK, "tools": tools, "tool_choice": choice, "seed": 3, "max_tokens": 400}
    whole = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert whole is not None and json.loads(whole[0].function.arguments)["city"] in ("Bern", "Rome")
    name, arguments, reasons = "", "", []
    for chunk in client.chat.completions.create(**asked, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            name += (call.function and call.function.name) or ""
            arguments += (call.function and call.function.arguments) or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert (name, arguments) == ("weather", whole[0].function.arguments)
    assert reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None}


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def answered(directory: Path, pieces: list[str], body: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The answer of the chat endpoint if the model outputs these pieces."""
    import threading

    fake = FakeEngine(directory)
    with serving(start=fake, options=ServerOptions(**options)) as server:

        def speak() -> None:
            server.wait_until(lambda: bool(fake.client.requests))
            for piece in pieces[:-1]:
                fake.client.send(piece)
            fake.client.send(pieces[-1], reason="stop")

        thread = threading.Thread(target=speak)
        thread.start()
        answer: dict[str, Any] = {}
        if body.get("stream"):
            answer["chunks"] = server.chunks(CHAT, body)
        else:
            answer = server.post(CHAT, body).json()
        thread.join()
        return answer


def test_auto_finds_a_call_in_the_output(tiny_directory: Path) -> None:
    body = {"messages": MESSAGES, "tools": [WEATHER]}
    (choice,) = answered(tiny_directory, ["Let me see. ", CALL], body)["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me see."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}


def test_auto_streams_text_and_calls_apart(tiny_directory: Path) -> None:
    body = {"messages": MESSAGES, "tools": [WEATHER], "stream": True}
    pieces = ["Let me", " see. ", CALL[:5], CALL[5:30], CALL[30:50], CALL[50:]]
    choices = [chunk["choices"][0] for chunk in answered(tiny_directory, pieces, body)["chunks"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert text.strip() == "Let me see." and "tool_call" not in text
    assert calls[0]["function"]["name"] == "weather" and calls[0]["type"] == "function"
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Bern"}'
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]


def test_a_chunk_has_one_entry_of_a_call(tiny_directory: Path) -> None:
    """Clients that read one entry of each chunk would lose the start of the arguments."""
    body = {"messages": MESSAGES, "tools": [WEATHER], "stream": True}
    choices = [chunk["choices"][0] for chunk in answered(tiny_directory, ["So: " + CALL + CALL], body)["chunks"]]
    entries = [choice["delta"]["tool_calls"] for choice in choices if "tool_calls" in choice["delta"]]
    assert [len(each) for each in entries] == [1] * len(entries)
    begun = [entry for (entry,) in entries if "name" in entry["function"]]
    assert [(entry["index"], entry["function"]["arguments"]) for entry in begun] == [(0, ""), (1, "")]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert text == "So:"


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_that_is_cut_short_is_a_call(server: Server, stream: bool) -> None:
    """Its arguments end where max_tokens ended them, in a stream and out of it."""
    tool = {
        "type": "function",
        "function": {
            "name": "note",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string", "minLength": 900}},
                "required": ["text"],
            },
        },
    }
    body = {"messages": MESSAGES, "tools": [tool], "tool_choice": "required", "seed": 1, "max_tokens": 120}
    if stream:
        choices = [chunk["choices"][0] for chunk in server.chunks(CHAT, {**body, "stream": True})]
        messages = [choice["delta"] for choice in choices]
    else:
        choices = server.post(CHAT, body).json()["choices"]
        messages = [choice["message"] for choice in choices]
    assert choices[-1]["finish_reason"] == "length"
    functions = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    assert functions[0]["name"] == "note"
    assert re.match(r'\{\s*"text"', "".join(function["arguments"] for function in functions))
    assert not "".join(message.get("content") or "" for message in messages)


def test_without_parallel_calls_only_the_first_is_returned(tiny_directory: Path) -> None:
    body = {"messages": MESSAGES, "tools": [WEATHER], "parallel_tool_calls": False}
    (choice,) = answered(tiny_directory, [CALL, CALL], body)["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    (both,) = answered(tiny_directory, [CALL, CALL], body | {"parallel_tool_calls": True})["choices"]
    assert len(both["message"]["tool_calls"]) == 2


@pytest.mark.parametrize("more", [{"tool_choice": "none"}, {}])
def test_output_that_is_no_call_is_text(tiny_directory: Path, more: dict[str, Any]) -> None:
    said = CALL if more else '<tool_call>{"name": "another", "arguments": {}}</tool_call>'
    (choice,) = answered(tiny_directory, [said], {"messages": MESSAGES, "tools": [WEATHER], **more})["choices"]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] == said
    assert "tool_calls" not in choice["message"]


def test_tools_that_the_template_does_not_show_are_refused(tmp_path: Path) -> None:
    """The model would not see them and would never call one."""
    save_tokenizer(tmp_path)
    config = {"eos_token": "<eos>", "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with serving(start=FakeEngine(tmp_path)) as server:
        error = server.error(CHAT, {"messages": MESSAGES, "tools": [WEATHER]})
    assert error["param"] == "tools" and "chat template" in error["message"]


def test_auto_can_be_disabled(auto_off_server: Server) -> None:
    error = auto_off_server.error(CHAT, {"messages": MESSAGES, "tools": [WEATHER]})
    assert error["param"] == "tool_choice"


@pytest.fixture
def auto_off_server(tiny_directory: Path) -> Any:
    with serving(start=FakeEngine(tiny_directory), options=ServerOptions(enable_auto_tool_choice=False)) as server:
        yield server


def test_earlier_calls_and_their_results_reach_the_template(server: Server) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert "<tool>sunny" in server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
