"""`system` and `messages` as chat messages: blocks of text, thinking, tool use and tool results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.errors import RequestError
from headrace.openai.errors import INVALID_TYPE, bad_request, not_supported

Block = dict[str, Any]
Message = dict[str, Any]

_ROLES = ("user", "assistant", "system")
_ERROR = "Error: "  # chat templates have no other place for `is_error`


def chat_messages(system: str | list[Block] | None, messages: Sequence[Message]) -> list[Message]:
    """Messages of the same role that follow each other are one turn, as in Anthropic's API."""
    if not messages:
        raise bad_request("messages is an empty list", "messages", "empty_prompt")
    read: list[Message] = []
    if system:
        read.append({"role": "system", "content": _texts(system, "system")})
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        role = message.get("role")
        if role not in _ROLES:
            raise bad_request(f"{place}.role must be 'user', 'assistant' or 'system', got {role!r}", "messages")
        for one in _chat_messages(role, message.get("content"), f"{place}.content"):
            _add(read, one)
    return read


def _chat_messages(role: str, content: Any, place: str) -> list[Message]:
    if role == "system":  # rules that an agent adds in the middle of a conversation
        return [{"role": role, "content": _texts(content, place)}]
    blocks = _blocks(content, place)
    return _of_user(blocks) if role == "user" else [_of_assistant(blocks)]


def is_prefill(messages: Sequence[Message]) -> bool:
    """Whether the answer continues the last message."""
    return bool(messages) and messages[-1]["role"] == "assistant"


def continued_text(messages: Sequence[Message]) -> str | None:
    """The text that the answer continues."""
    return messages[-1]["content"] if is_prefill(messages) else None


def _add(messages: list[Message], message: Message) -> None:
    last = messages[-1] if messages else None
    if last is None or last["role"] != message["role"] or message["role"] == "tool":
        messages.append(message)
        return
    last["content"] = "\n".join(text for text in (last["content"], message["content"]) if text) or None
    if calls := message.get("tool_calls"):
        last.setdefault("tool_calls", []).extend(calls)


def _blocks(content: Any, place: str) -> list[tuple[Block, str]]:
    """Each block with its place."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, place)]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise _wrong(place, "text or a list of blocks")
    return [(block, f"{place}[{index}]") for index, block in enumerate(content)]


def _of_user(blocks: list[tuple[Block, str]]) -> list[Message]:
    """The results of tools come first, each as a message of its own."""
    results, texts = [], []
    for block, where in blocks:
        if block.get("type") == "tool_result":
            results.append(_tool_result(block, where))
        else:
            texts.append(_text_of(block, where))
    if texts or not results:
        return [*results, {"role": "user", "content": "\n".join(texts)}]
    return results


def _tool_result(block: Block, place: str) -> Message:
    content = block.get("content")
    text = "" if content is None else _texts(content, f"{place}.content")
    if block.get("is_error") and not text.lower().startswith("error"):
        text = _ERROR + text
    return {"role": "tool", "tool_call_id": _text(block, "tool_use_id", place), "content": text}


def _of_assistant(blocks: list[tuple[Block, str]]) -> Message:
    texts, calls, thoughts = [], [], []
    for block, where in blocks:
        match block.get("type"):
            case "tool_use":
                calls.append(_call(block, where))
            case "thinking":
                thoughts.append(_text(block, "thinking", where))
            case _:
                texts.append(_text_of(block, where))
    message: Message = {"role": "assistant", "content": "\n".join(texts) if texts or not calls else None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Block, place: str) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, dict):
        raise _wrong(f"{place}.input", "an object")
    function = {"name": _text(block, "name", place), "arguments": msgspec.json.encode(given).decode()}
    return {"id": _text(block, "id", place), "type": "function", "function": function}


def _texts(content: Any, place: str) -> str:
    return "\n".join(_text_of(block, where) for block, where in _blocks(content, place))


def _text_of(block: Block, place: str) -> str:
    """The text of a block. Its `cache_control` and `citations` have no effect: prefixes are cached by themselves."""
    kind = block.get("type")
    if kind != "text":
        raise not_supported(place, f"{place} has the type {kind!r}, which is not supported: the model reads text only")
    text = block.get("text")
    if not isinstance(text, str):
        raise _wrong(f"{place}.text", "text")
    return text


def _text(block: Block, name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{place}.{name}", "text")
    return value


def _wrong(place: str, rule: str) -> RequestError:
    return bad_request(f"{place} must be {rule}", place, INVALID_TYPE)
