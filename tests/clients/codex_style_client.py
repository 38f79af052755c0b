"""What coding agents in the style of Codex send to the Responses API: nothing stored, reasoning packed, a shell tool.

Only the standard library: the bodies are what counts.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from tests.clients.checks import KEY, MODEL, URL, check, main

SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a shell command and returns its output.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"enum": ["ls", "pwd", "-l"]}, "minItems": 1, "maxItems": 3},
            "timeout_ms": {"type": "integer", "minimum": 1, "maximum": 9999},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}
PLAN = {
    "type": "function",
    "name": "update_plan",
    "description": "Updates the task plan.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"explanation": {"type": "string", "maxLength": 20}}},
}


def body(items: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "instructions": "You are a coding agent.",
        "input": items,
        "tools": [SHELL, PLAN],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-session",
        "client_metadata": {"installation": "x"},
        "text": {"verbosity": "low"},
        **more,
    }


def events(given: dict[str, Any]) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", "Accept": "text/event-stream"}
    request = urllib.request.Request(f"{URL}/responses", json.dumps(given).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        lines = [line.decode() for line in answer if line.startswith(b"data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


@check
def a_turn_that_leaves_the_choice_to_the_model() -> None:
    seen = events(body([user("Say hello.")], max_output_tokens=64))
    assert seen[0]["type"] == "response.created" and seen[-1]["type"] in ("response.completed", "response.incomplete")
    assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
    response = seen[-1]["response"]
    done = [event["item"] for event in seen if event["type"] == "response.output_item.done"]
    assert done == response["output"] and response["store"] is False and response["usage"]["output_tokens"] > 0


@check
def a_shell_call_and_its_output() -> None:
    seen = events(body([user("List the files.")], tool_choice={"type": "function", "name": "shell"}))
    (call,) = [event["item"] for event in seen if event["type"] == "response.output_item.done"]
    assert call["type"] == "function_call" and json.loads(call["arguments"])["command"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"output":"a.py","exit_code":0}'}
    after = events(body([user("List the files."), call, output, user("Well?")], max_output_tokens=64))
    assert after[-1]["response"]["usage"]["input_tokens"] > seen[-1]["response"]["usage"]["input_tokens"]


if __name__ == "__main__":
    main("codex-style", installed="requests of 2026")
