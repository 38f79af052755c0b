"""The items of a response's input, and the chat messages that they stand for.

A turn of the assistant is one chat message but several items: its reasoning, its text and its calls.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Any

from headrace.errors import RequestError
from headrace.openai.errors import INVALID_TYPE, bad_request, not_supported
from headrace.openai.response_tools import full_name
from headrace.openai.schema.responses import ResponsesRequest

Item = dict[str, Any]
FindItem = Callable[[str], Item | None]

_TEXT_PARTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")
_PACKED = "headrace:"  # the start of an `encrypted_content`


def input_items(request: ResponsesRequest, find: FindItem | None = None) -> list[Item]:
    """The items of `input`. `find` returns the stored item with an id; without it there are none."""
    if isinstance(request.input, str):
        part = {"type": "input_text", "text": request.input}
        return [{"type": "message", "role": "user", "content": [part]}]
    if not request.input:
        raise bad_request("input is an empty list", "input", "empty_prompt")
    return [_referred(item, f"input[{index}]", find) for index, item in enumerate(request.input)]


def as_messages(request: ResponsesRequest, items: Sequence[Item] | None = None) -> list[dict[str, Any]]:
    """`items`: the whole conversation, where it is more than the input of this request."""
    messages = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    if items is None and isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    return messages + _Conversation().read(input_items(request) if items is None else items)


def _referred(item: Item, place: str, find: FindItem | None) -> Item:
    if item.get("type") != "item_reference":
        return item
    id = _text(item, "id", place)
    found = None if find is None else find(id)
    if found is None:
        raise not_supported(place, f"{place} refers to the item {id[:80]!r}, which is not stored here; send it whole")
    return found


class _Conversation:
    """Reads items one after the other into messages."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._reasoning: str | None = None  # for the assistant's message that follows

    def read(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        for index, item in enumerate(items):
            self._take(item, f"input[{index}]")
        return self._messages

    def _take(self, item: Item, place: str) -> None:
        match item.get("type", "message"):
            case "message":
                role, content = _role(item, place), _content(item.get("content"), f"{place}.content")
                self._add({"role": role, "content": content})
            case "function_call":
                name = full_name(_text(item, "name", place), item.get("namespace"))
                function = {"name": name, "arguments": _maybe_empty(item, "arguments", place)}
                self._add_call({"id": _text(item, "call_id", place), "type": "function", "function": function})
            case "function_call_output":
                output = _content(item.get("output"), f"{place}.output")
                self._add({"role": "tool", "tool_call_id": _text(item, "call_id", place), "content": output})
            case "reasoning":
                self._reasoning = _reasoning(item, place) or None
            case other:
                raise not_supported(
                    place, f"{place} has the type {other!r}; only messages, function calls and reasoning are read"
                )

    def _add(self, message: dict[str, Any]) -> None:
        if message["role"] == "assistant" and self._reasoning is not None:
            message["reasoning_content"] = self._reasoning
        self._reasoning = None
        self._messages.append(message)

    def _add_call(self, call: dict[str, Any]) -> None:
        """Calls belong to the assistant's message before them."""
        last = self._messages[-1] if self._messages else None
        if last is None or last["role"] != "assistant" or self._reasoning is not None:
            self._add({"role": "assistant", "content": None, "tool_calls": [call]})
        else:
            last.setdefault("tool_calls", []).append(call)


def _role(item: Item, place: str) -> str:
    """OpenAI's role `developer` is `system` in chat templates."""
    role = _text(item, "role", place)
    return "system" if role == "developer" else role


def _text(item: Item, name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise _wrong(f"{place}.{name}", "text")
    return value


def _maybe_empty(item: Item, name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
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
    return {"type": "text", "text": _maybe_empty(part, "text", place)}


def _reasoning(item: Item, place: str) -> str:
    """The text of a reasoning item: its content, else what was packed for a client that stores it, else its summary."""
    for name in ("content", "encrypted_content", "summary"):
        if not (value := item.get(name)):
            continue
        if name == "encrypted_content":
            return unpack_reasoning(value, f"{place}.{name}")
        parts = _content(value, f"{place}.{name}")
        return parts if isinstance(parts, str) else "\n".join(part["text"] for part in parts)
    return ""


def pack_reasoning(text: str) -> str:
    """`encrypted_content`, which clients send back unread. It is only encoded: there is nothing to hide from them."""
    return _PACKED + base64.b64encode(text.encode()).decode()


def unpack_reasoning(packed: Any, place: str) -> str:
    try:
        if not (isinstance(packed, str) and packed.startswith(_PACKED)):
            raise ValueError
        return base64.b64decode(packed.removeprefix(_PACKED), validate=True).decode()
    except (ValueError, binascii.Error):
        raise bad_request(f"{place} was not written by this server; leave the reasoning item out", place) from None


def listed(item: Item, id: str) -> Item:
    """An item of the input as it is listed: with a type, a status and an id, which is `id` unless it has one."""
    kind = item.get("type", "message")
    shown = {**item, "type": kind, "id": item.get("id") or id}
    if kind != "reasoning":
        shown["status"] = item.get("status") or "completed"
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        shown["content"] = [{"type": part, "text": item["content"]}]
    return shown


def _wrong(place: str, rule: str) -> RequestError:
    return bad_request(f"{place} must be {rule}", place, INVALID_TYPE)
