"""The input of /v1/responses as chat messages."""

from __future__ import annotations

from typing import Any

from headrace.errors import RequestError
from headrace.openai.errors import INVALID_TYPE, bad_request, not_supported
from headrace.openai.schema.responses import ResponsesRequest

_TEXT_PARTS = ("input_text", "output_text", "text")


def as_messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    if not request.input:
        raise bad_request("input is an empty list", "input", "empty_prompt")
    return messages + [_message(item, f"input[{index}]") for index, item in enumerate(request.input)]


def _message(item: dict[str, Any], place: str) -> dict[str, Any]:
    match item.get("type", "message"):
        case "message":
            return {"role": _role(item, place), "content": _content(item.get("content"), f"{place}.content")}
        case "function_call":
            function = {name: _text(item, name, place) for name in ("name", "arguments")}
            call = {"id": _text(item, "call_id", place), "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        case "function_call_output":
            output = _content(item.get("output"), f"{place}.output")
            return {"role": "tool", "tool_call_id": _text(item, "call_id", place), "content": output}
        case "item_reference":
            raise not_supported(place, f"{place} refers to a stored item, and nothing is stored here; send it whole")
        case other:
            raise not_supported(place, f"{place} has the type {other!r}; only messages and function calls are read")


def _role(item: dict[str, Any], place: str) -> str:
    """OpenAI's role `developer` is `system` in chat templates."""
    role = _text(item, "role", place)
    return "system" if role == "developer" else role


def _text(item: dict[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise _wrong(f"{place}.{name}", "text")
    return value


def _content(content: Any, place: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(place, "text or a list of parts")
    return [_part(part, f"{place}[{index}]") for index, part in enumerate(content)]


def _part(part: Any, place: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise _wrong(place, "an object")
    kind = part.get("type")
    if kind not in _TEXT_PARTS:
        raise not_supported(place, f"{place} has the type {kind!r}; only text is read")
    return {"type": "text", "text": _text(part, "text", place)}


def _wrong(place: str, rule: str) -> RequestError:
    return bad_request(f"{place} must be {rule}", place, INVALID_TYPE)
