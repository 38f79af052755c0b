"""Anthropic's Messages API over the fake engine: the test writes the model's answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.asgi import GateBench
from tests.server.fake_engine import FakeEngine
from tests.server.fake_model import Model, prompt_of
from tests.server.serving import MODEL, Server, serving

PATH = "/v1/messages"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WEATHER: Any = {
    "name": "weather",
    "description": "The weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
HI = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 50, "messages": HI}


@pytest.fixture(scope="module")
def fake(tiny_directory: Path) -> FakeEngine:
    return FakeEngine(tiny_directory)


@pytest.fixture(scope="module")
def server(fake: FakeEngine) -> Iterator[Server]:
    with serving(start=fake) as running:
        yield running


def refused(server: Server, more: dict[str, Any], status: int = 400, path: str = PATH, **options: Any) -> str:
    """The type and the message of an error, which must have Anthropic's form."""
    answer = server.post(path, BODY | more, **options)
    body = answer.json()
    assert answer.status_code == status and body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
    return f"{body['error']['type']}: {body['error']['message']}"


def events_of(server: Server, more: dict[str, Any]) -> list[dict[str, Any]]:
    text = server.post(PATH, BODY | more | {"stream": True}).text
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_a_message_is_answered_with_a_message(server: Server, fake: FakeEngine) -> None:
    system = [
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "!"},
    ]
    with Model(server, fake, ["Hello."]):
        answer = server.post(PATH, BODY | {"system": system, "metadata": {"user_id": "x"}}).json()
    assert prompt_of(fake) == "<system>Be brief.\n!\n<user>hi\n<assistant>"
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Hello."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(prompt_of(fake)),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 6,
        },
    }


def test_tools_are_used_and_their_results_read(server: Server, fake: FakeEngine) -> None:
    with Model(server, fake, [f"Let me see. {CALL}"]):
        answer = server.post(PATH, BODY | {"tools": [WEATHER]}).json()
    text, call = answer["content"]
    assert answer["stop_reason"] == "tool_use" and text == {"type": "text", "text": "Let me see."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Rome"})
    results = [
        {
            "type": "tool_result",
            "tool_use_id": call["id"],
            "content": [{"type": "text", "text": "no city"}],
            "is_error": True,
        },
        {"type": "text", "text": "Well?"},
    ]
    messages = [*HI, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]
    with Model(server, fake, ["Sorry."]):
        answer = server.post(PATH, BODY | {"tools": [WEATHER], "messages": messages}).json()
    assert answer["content"] == [{"type": "text", "text": "Sorry."}]
    assert prompt_of(fake) == (
        "<tool weather>\n<user>hi\n<assistant>Let me see.\n<tool>Error: no city\n<user>Well?\n<assistant>"
    )


def test_the_events_of_text_and_a_call_are_those_of_two_blocks(server: Server, fake: FakeEngine) -> None:
    with Model(server, fake, ["Let ", "me. <tool", CALL[5:20], CALL[20:]]):
        events = events_of(server, {"tools": [WEATHER]})
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [start["index"] for start in starts] == [0, 1] and starts[0]["content_block"] == {"type": "text", "text": ""}
    assert starts[1]["content_block"]["input"] == {} and starts[1]["content_block"]["name"] == "weather"
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == "Let me."
    assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == {"city": "Rome"}
    assert {delta["type"] for delta in deltas} == {"text_delta", "input_json_delta"}
    assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == len("Let me. ") + len(CALL)


def test_the_stop_sequence_is_named(server: Server, fake: FakeEngine) -> None:
    with Model(server, fake, ["One. END two"], ["One. END two"]):
        whole = server.post(PATH, BODY | {"stop_sequences": ["END"]}).json()
        events = events_of(server, {"stop_sequences": ["END"]})
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "END")
    assert whole["content"][0]["text"] == "One. " and events[-2]["delta"]["stop_sequence"] == "END"


@pytest.mark.parametrize(("max_tokens", "reason"), [(5, "max_tokens"), (32_000, "model_context_window_exceeded")])
def test_an_answer_that_is_cut_says_by_what(server: Server, fake: FakeEngine, max_tokens: int, reason: str) -> None:
    with Model(server, fake, ["Hello"], reason="length"):
        assert server.post(PATH, BODY | {"max_tokens": max_tokens}).json()["stop_reason"] == reason
    assert fake.client.requests[-1].params.max_tokens == min(max_tokens, 512 - len(prompt_of(fake)))


def test_a_last_message_of_the_assistant_is_continued(server: Server, fake: FakeEngine) -> None:
    with Model(server, fake, ["!"]):
        server.post(PATH, BODY | {"messages": [*HI, {"role": "assistant", "content": "Hello"}]})
    assert prompt_of(fake) == "<user>hi\n<assistant>Hello"


def test_turns_of_one_role_are_joined(server: Server, fake: FakeEngine) -> None:
    with Model(server, fake, ["!"]):
        server.post(PATH, BODY | {"messages": [*HI, {"role": "user", "content": [{"type": "text", "text": "you"}]}]})
    assert prompt_of(fake) == "<user>hi\nyou\n<assistant>"


def test_what_coding_agents_send_is_accepted(server: Server, fake: FakeEngine) -> None:
    tools = [{**WEATHER, "name": f"Tool{number}", "cache_control": {"type": "ephemeral"}} for number in range(20)]
    body = {
        "max_tokens": 32_000,
        "system": [{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "tools": tools,
        "thinking": {"type": "enabled", "budget_tokens": 31_999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "messages": [*HI, {"role": "system", "content": "Today is Monday."}],
        "metadata": {"user_id": "user_x_account__session_y"},
        "temperature": 1,
    }
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    }
    with Model(server, fake, ['<tool_call>\n{"name": "Tool7", "arguments": {}}\n</tool_call>']):
        answer = server.post(f"{PATH}?beta=true", BODY | body, headers=headers)
    assert answer.json()["content"][0]["name"] == "Tool7"
    count = {name: value for name, value in (BODY | body).items() if name in ("model", "messages", "system", "tools")}
    newer = headers | {"anthropic-version": "2026-10-21"}
    counted = server.post(f"{PATH}/count_tokens?beta=true", count, headers=newer)
    assert counted.json() == {"input_tokens": len(prompt_of(fake))}


def test_thinking_blocks_of_earlier_turns_are_read(server: Server, fake: FakeEngine) -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    said = [thought, {"type": "text", "text": "yes?"}]
    with Model(server, fake, ["!"]):
        server.post(PATH, BODY | {"messages": [*HI, {"role": "assistant", "content": said}, *HI]})
    assert prompt_of(fake) == "<user>hi\n<assistant>yes?\n<user>hi\n<assistant>"


@pytest.mark.parametrize(
    ("choice", "forced"),
    [({"type": "any"}, True), ({"type": "tool", "name": "weather"}, True), ({"type": "auto"}, False)],
)
def test_a_forced_tool_is_a_constraint(server: Server, fake: FakeEngine, choice: Any, forced: bool) -> None:
    with Model(server, fake, [CALL]):
        server.post(PATH, BODY | {"tools": [WEATHER], "tool_choice": choice | {"disable_parallel_tool_use": True}})
    assert (fake.client.requests[-1].params.structured_outputs is not None) == forced


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "at least 1"),
        ({"messages": []}, "empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "type 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "type 'document'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]}, "redacted"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]}, "input"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "maximum context length"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"tools": [{"name": "f"}]}, "input_schema"),
        ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "wind"}}, "none of the tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "xml"}}}, "json_schema"),
        ({"stop": ["x"]}, "unknown parameter 'stop'"),
        ({"temperature": "warm"}, "temperature"),
    ],
)
def test_what_cannot_be_done_is_refused(server: Server, more: dict[str, Any], message: str) -> None:
    assert refused(server, more).startswith("invalid_request_error: ") and message in refused(server, more)


def test_errors_have_the_types_of_their_statuses(server: Server) -> None:
    assert refused(server, {"model": "claude"}, 404).startswith("not_found_error")
    assert "2026-10-21" in refused(server, {}, headers={"anthropic-version": "2022-01-01"})
    assert refused(server, {}, 404, f"{PATH}/batches").startswith("not_found_error")
    server.queue.is_full = True
    assert refused(server, {}, 503).startswith("overloaded_error")
    server.queue.is_full = False


def test_a_failure_of_a_stream_is_an_error_event(server: Server, fake: FakeEngine) -> None:
    num_before = len(fake.client.requests)

    def start() -> None:
        server.wait_until(lambda: len(fake.client.requests) > num_before)
        server.on_loop(lambda: fake.client.send("Hel"))

    starting = threading.Thread(target=start)
    starting.start()
    with server.http.stream("POST", server.url + PATH, json=BODY | {"stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: message_start"
        server.on_loop(lambda: fake.client.send("lo", reason="abort", error="out of memory"))
        rest = list(lines)
    starting.join()
    assert rest[-3] == "event: error" and json.loads(rest[-2].removeprefix("data: "))["error"]["type"] == "api_error"


def test_the_gate_refuses_in_anthropics_form() -> None:
    answer = GateBench(api_key="right").ask(PATH, {"x-api-key": "wrong"}, method="POST")
    body = json.loads(answer.body)
    assert answer.status == 401 and body["error"]["type"] == "authentication_error"
    assert answer.headers["request-id"] == body["request_id"]
    accepted = GateBench(api_key="right").ask(PATH, {"x-api-key": "right"}, method="POST")
    assert accepted.status == 200
