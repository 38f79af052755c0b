"""The events of a streamed response, numbered from 0.

response.created, response.in_progress
for each item      response.output_item.added
  of text            response.content_part.added, response.output_text.delta ..., .done, response.content_part.done
  of reasoning       the same with response.reasoning_text.delta
  of a call          response.function_call_arguments.delta ..., .done
                   response.output_item.done
response.completed, response.incomplete or response.failed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.engine.answers import AnswerDelta
from headrace.openai.response_output import Output, OutputItem, reasoning_part, text_part
from headrace.openai.responses import ResponseWriter, status_of
from headrace.openai.usage import Usage
from headrace.server.http.chunks import encode
from headrace.server.http.errors import ApiError
from headrace.text.answer_parts import ContentDelta, Delta
from headrace.types import CompletionOutput, TokenLogprobs

_DELTAS = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
}


class ResponseEvents:
    """Writes the events of one stream."""

    def __init__(self, writer: ResponseWriter, *, starts_queued: bool = False) -> None:
        """`starts_queued`: `response.queued` has been written by `queued`."""
        self._writer = writer
        format = writer.fields.format
        self._reader = None if format is None else format.reader()
        self._output = Output(writer.make_id)
        self._open: OutputItem | None = None  # the item that grows
        self._head = b""  # of its deltas
        self._unassigned: list[TokenLogprobs] = []  # of tokens whose text has not been written
        self._number = 0
        self._is_begun = False
        self._starts_queued = starts_queued

    # ---- in order

    def queued(self) -> bytes:
        """The first events of a response in the background."""
        response = self._writer.response("queued", [])
        return self._event("response.created", {"response": response}) + self._event(
            "response.queued", {"response": response}
        )

    def delta(self, delta: AnswerDelta) -> bytes:
        begin = b"" if self._is_begun else self._begin()
        if self._reader is None:
            return begin + self._text(delta) if delta.text or delta.logprobs else begin
        pieces = self._reader.read(delta.text, is_end=delta.finish_reason is not None)
        self._unassigned += delta.logprobs or ()
        logprobs = self._assigned(pieces)
        return begin + b"".join([self._take(piece, logprobs) for piece in pieces])

    def _assigned(self, pieces: Sequence[Delta]) -> bytes:
        """The log-probabilities of the text that ends these pieces, as JSON."""
        if not pieces:
            return b"[]"
        last, entries = pieces[-1], self._unassigned
        self._unassigned = []
        if not entries or not isinstance(last, ContentDelta):
            return b"[]"
        return encode(self._writer.logprobs_of(last.text, entries))

    def end(self, answer: CompletionOutput, usage: Usage) -> tuple[bytes, dict[str, Any]]:
        """The last events, and the response."""
        begin = b"" if self._is_begun else self._begin()
        status, writer, output = status_of(answer.finish_reason), self._writer, self._output
        if not output.items:
            begin += self._take(ContentDelta(""))
        items = writer.items(output, status, answer.logprobs)
        response = writer.response(status, items, writer.usage(usage, output))
        response |= writer.raw_messages(answer.text, answer.token_ids)
        last = self._close(status, items[-1])
        return begin + last + self._event(f"response.{status}", {"response": response}), response

    def failed(self, error: ApiError) -> tuple[bytes, dict[str, Any]]:
        begin = b"" if self._is_begun else self._begin()
        response = self._writer.response("failed", [], error=error.message)
        return begin + self._event("response.failed", {"response": response}), response

    # ---- parts

    def _begin(self) -> bytes:
        self._is_begun = True
        started = {"response": self._writer.response("in_progress", [])}
        created = b"" if self._starts_queued else self._event("response.created", started)
        return created + self._event("response.in_progress", started)

    def _text(self, delta: AnswerDelta) -> bytes:
        """The common event: more text of an answer that is nothing else."""
        begin = b""
        if self._open is None:
            begin = self._start(self._output.take(ContentDelta("")))
        assert self._open is not None
        self._open.texts.append(delta.text)
        logprobs = encode(self._writer.logprobs(delta.logprobs)) if delta.logprobs else b"[]"
        tail = b',"logprobs":%b,"sequence_number":%d}\n\n' % (logprobs, self._next())
        return begin + self._head + encode(delta.text) + tail

    def _take(self, delta: Delta, logprobs: bytes = b"[]") -> bytes:
        item = self._output.take(delta)
        begin = b""
        if item is not self._open:
            begin = (b"" if self._open is None else self._close("completed")) + self._start(item)
        text = item.texts[-1]
        if not text:
            return begin
        shown = b',"logprobs":' + logprobs if item.kind == "message" else b""
        return begin + self._head + encode(text) + shown + b',"sequence_number":%d}\n\n' % self._next()

    def _start(self, item: OutputItem) -> bytes:
        self._open = item
        self._head = _event_head(_DELTAS[item.kind]) + encode(_place(item))[1:-1] + b',"delta":'
        added = {"output_index": item.index, "item": self._writer.item(item, "in_progress")}
        events = self._event("response.output_item.added", added)
        if item.kind == "function_call":
            return events
        part = text_part("") if item.kind == "message" else reasoning_part("")
        return events + self._event("response.content_part.added", {**_place(item), "part": part})

    def _close(self, status: str, shown: dict[str, Any] | None = None) -> bytes:
        """The end of the open item; `shown`: the item as it is in the response."""
        item = self._open
        assert item is not None
        shown = shown or self._writer.item(item, status)
        done = {"output_index": item.index, "item": shown}
        return self._parts_done(item, shown) + self._event("response.output_item.done", done)

    def _parts_done(self, item: OutputItem, shown: dict[str, Any]) -> bytes:
        place = _place(item)
        if item.kind == "function_call":
            done = {**place, "name": shown["name"], "arguments": item.text}
            return self._event("response.function_call_arguments.done", done)
        (part,) = shown["content"]
        if item.kind == "message":
            done = {**place, "text": item.text, "logprobs": part["logprobs"]}
            events = self._event("response.output_text.done", done)
        else:
            events = self._event("response.reasoning_text.done", {**place, "text": item.text})
        return events + self._event("response.content_part.done", {**place, "part": part})

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        return _event_head(name) + encode({**fields, "sequence_number": self._next()})[1:] + b"\n\n"

    def _next(self) -> int:
        self._number += 1
        return self._number - 1


def _place(item: OutputItem) -> dict[str, Any]:
    place = {"item_id": item.id, "output_index": item.index}
    return place if item.kind == "function_call" else {**place, "content_index": 0}


def _event_head(name: str) -> bytes:
    return b'event: %b\ndata: {"type":"%b",' % (name.encode(), name.encode())
