"""The message that answers a request, whole or as events.

message_start, ping
for each block     content_block_start, content_block_delta ..., content_block_stop
message_delta (the stop reason and the usage), message_stop
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from headrace.openai.answer_format import AnswerFormat
from headrace.openai.response_output import Output, OutputItem, whole_deltas
from headrace.openai.usage import Usage
from headrace.text.answer_parts import ContentDelta, Delta

ID_PREFIX = "msg_"
encode = msgspec.json.Encoder().encode

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_DELTAS = {
    "message": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "function_call": ("input_json_delta", "partial_json"),
}


class Stop(NamedTuple):
    """Why an answer ended."""

    reason: str
    sequence: str | None = None


def stop_of(finish_reason: str | None, stop_reason: int | str | None, *, has_calls: bool, fills_context: bool) -> Stop:
    """`fills_context`: the context, not `max_tokens`, limited the answer."""
    if finish_reason == "length":
        return Stop("model_context_window_exceeded" if fills_context else "max_tokens")
    if isinstance(stop_reason, str):
        return Stop("stop_sequence", stop_reason)
    return Stop("tool_use" if has_calls else "end_turn")


class MessageWriter:
    """Writes the objects and events of one answer."""

    def __init__(self, format: AnswerFormat | None, *, id: str, model_name: str, fills_context: bool) -> None:
        self._format = format
        self._reader = None if format is None else format.reader()
        self._id = id
        self._model_name = model_name
        self._fills_context = fills_context
        self._output = Output(lambda prefix: "")
        self._open: OutputItem | None = None  # the block that grows
        self._head = b""  # of its deltas
        self.is_begun = False

    # ---- whole

    def whole(
        self, text: str, finish_reason: str | None, stop_reason: int | str | None, usage: Usage
    ) -> dict[str, Any]:
        found = Output.of(whole_deltas(self._format, text), lambda prefix: "").items
        items = [item for item in found if item.text or item.kind != "message"]
        stop = self._stop(items, finish_reason, stop_reason)
        return self._message([_block(item) for item in items], usage, stop)

    def _message(self, content: list[dict[str, Any]], usage: Usage, stop: Stop | None = None) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model_name,
            "content": content,
            "stop_reason": None if stop is None else stop.reason,
            "stop_sequence": None if stop is None else stop.sequence,
            "usage": usage_object(usage),
        }

    def _stop(self, items: list[OutputItem], finish_reason: str | None, stop_reason: int | str | None) -> Stop:
        has_calls = any(item.kind == "function_call" for item in items)
        return stop_of(finish_reason, stop_reason, has_calls=has_calls, fills_context=self._fills_context)

    # ---- events

    def begin(self, usage: Usage) -> bytes:
        self.is_begun = True
        return _event("message_start", {"message": self._message([], usage)}) + _PING

    def delta(self, text: str, *, is_end: bool) -> bytes:
        """The events of more text of the answer."""
        if self._reader is None:
            return self._take(ContentDelta(text)) if text else b""
        return b"".join([self._take(piece) for piece in self._reader.read(text, is_end=is_end)])

    def end(self, finish_reason: str | None, stop_reason: int | str | None, usage: Usage) -> bytes:
        stop = self._stop(self._output.items, finish_reason, stop_reason)
        last = {"delta": {"stop_reason": stop.reason, "stop_sequence": stop.sequence}, "usage": usage_object(usage)}
        return self._close() + _event("message_delta", last) + _event("message_stop", {})

    def _take(self, delta: Delta) -> bytes:
        item = self._output.take(delta)
        begin = b""
        if item is not self._open:
            begin = self._close() + self._start(item)
        text = item.texts[-1]
        return begin + self._head + encode(text) + b"}}\n\n" if text else begin

    def _start(self, item: OutputItem) -> bytes:
        self._open = item
        kind, name = (text.encode() for text in _DELTAS[item.kind])
        self._head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
            % (item.index, kind, name)
        )
        return _event("content_block_start", {"index": item.index, "content_block": _block(item, is_start=True)})

    def _close(self) -> bytes:
        item, self._open = self._open, None
        return b"" if item is None else _event("content_block_stop", {"index": item.index})


def _block(item: OutputItem, *, is_start: bool = False) -> dict[str, Any]:
    text = "" if is_start else item.text
    match item.kind:
        case "message":
            return {"type": "text", "text": text}
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        case "function_call":
            return {"type": "tool_use", "id": item.call_id, "name": item.name, "input": _arguments(text)}


def _arguments(text: str) -> dict[str, Any]:
    """The input of a call. That of a call that was cut short is empty: half of it is no object."""
    try:
        read = msgspec.json.decode(text or "{}")
    except (msgspec.MsgspecError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def usage_object(usage: Usage) -> dict[str, Any]:
    """Anthropic counts cached tokens apart from the other tokens of the input."""
    return {
        "input_tokens": usage.num_prompt - usage.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.num_generated,
    }


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode({"type": name, **fields}))


def error_event(error: dict[str, object]) -> bytes:
    return b"event: error\ndata: %b\n\n" % encode(error)
