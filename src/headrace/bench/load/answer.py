"""The bytes of one answer: times of its chunks, token counts, errors. No I/O and no clock.

A chunk counts as text when it carries text, reasoning or a tool call that is not empty; the first such chunk is the
first token. Most chunks are recognised by searching their bytes for a JSON key with a value, for example `"text":"`.
Those bytes cannot be part of a text: a quotation mark within a JSON string is preceded by a backslash, so `text"` ends
a string, and only a key is followed by a colon. All other lines are decoded.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

TEXT_KEYS = ("text", "content", "reasoning_content", "reasoning", "refusal")
MAX_ERROR_LEN = 300  # characters of a message that goes into a record
MAX_ERROR_BODY = 65_536  # bytes of an error's body that are kept
REFUSED = (429, 503)
ABORTED = ("abort", "error")  # finish reasons of answers that the server gave up

_QUOTE = 0x22
_USAGE = b'"usage"'
_NULL_USAGE = re.compile(rb'"usage"\s*:\s*null')
_MARKERS = [f'"{key}":{space}"'.encode() for key in TEXT_KEYS for space in ("", " ")]


class Answer:
    """One answer while it arrives. The connection feeds it; nobody else changes it."""

    __slots__ = (
        "_error_body",
        "_is_stream",
        "_last_text",
        "_marker",
        "_pending",
        "chunk_at",
        "error",
        "has_finish_reason",
        "http_status",
        "is_done",
        "last_at",
        "num_cached_tokens",
        "num_output_tokens",
        "num_prompt_tokens",
    )

    def __init__(self) -> None:
        self.chunk_at: list[float] = []  # arrival of chunks with text
        self.last_at: float | None = None  # arrival of the last chunk of the answer, with text or not
        self.http_status: int | None = None
        self.error: str | None = None
        self.is_done = False  # `data: [DONE]` was seen
        self.has_finish_reason = False
        self.num_prompt_tokens: int | None = None  # from the server's usage
        self.num_output_tokens: int | None = None
        self.num_cached_tokens: int | None = None
        self._is_stream = True
        self._pending = b""  # the start of a line whose end has not arrived
        self._error_body = b""
        self._marker: bytes | None = None  # what text chunks of this answer contain
        self._last_text = b""

    def start(self, http_status: int, content_type: bytes) -> None:
        """The head has arrived."""
        self.http_status = http_status
        self._is_stream = http_status == 200 and b"json" not in content_type.lower()

    def feed(self, data: bytes, now: float) -> None:
        """A piece of the body, split anywhere."""
        if not self._is_stream:
            if len(self._error_body) < MAX_ERROR_BODY or self.http_status == 200:
                self._error_body += data
            return
        if self._pending:
            data = self._pending + data
        lines = data.split(b"\n")
        self._pending = lines.pop()
        marker = self._marker
        for line in lines:
            if len(line) < 2:  # the blank line after an event
                continue
            if marker is not None and _has_text(line, marker):
                self.chunk_at.append(now)
                self._last_text = line
            else:
                self._line(line, now)
                marker = self._marker

    def end(self, now: float) -> None:
        """The body is complete. Whether the answer is, `error` says afterwards."""
        if not self._is_stream:
            self._end_of_json(now)
            return
        if self._pending:
            line, self._pending = self._pending, b""
            self._line(line, now)
        if not self.has_finish_reason and self._last_text:  # it was not decoded
            chunk = _decoded(self._last_text[5:].strip())
            self._read_finish(chunk.get("choices") if isinstance(chunk, dict) else None)
        # A finish reason will do where a server sends no [DONE].
        if self.error is None and not self.is_done and not self.has_finish_reason:
            self.error = "the stream ended without [DONE] or a finish reason"

    @property
    def end_at(self) -> float | None:
        """Arrival of the last chunk of the answer."""
        last_text = self.chunk_at[-1] if self.chunk_at else None
        if self.last_at is None or last_text is None:
            return self.last_at if last_text is None else last_text
        return max(self.last_at, last_text)

    def _line(self, line: bytes, now: float) -> None:
        if not line.startswith(b"data:"):  # a comment, an event's name or id, the blank line of CRLF
            return
        payload = line[5:].strip()
        if payload == b"[DONE]":
            self.is_done = True
        elif payload:
            self._chunk(payload, now)

    def _chunk(self, payload: bytes, now: float) -> None:
        chunk = _decoded(payload)
        if not isinstance(chunk, dict):
            self.error = self.error or f"the stream has an event that is not a JSON object: {_short(payload)}"
            return
        if (message := _message_of_error(chunk)) is not None:
            self.error = self.error or f"error in the stream: {message}"
            return
        self._read_counts(chunk)
        choices = [choice for choice in chunk.get("choices") or [] if isinstance(choice, dict)]
        if not choices:
            return
        self.last_at = now
        self._read_finish(choices)
        if any(map(_has_content, choices)):
            self.chunk_at.append(now)
            self._marker = next((marker for marker in _MARKERS if _has_value(payload, marker)), None)

    def _read_finish(self, choices: Any) -> None:
        for choice in choices or []:
            reason = choice.get("finish_reason") if isinstance(choice, dict) else None
            self.has_finish_reason |= bool(reason)
            if reason in ABORTED:
                self.error = self.error or f"the server gave the answer up (finish reason {reason})"

    def _read_counts(self, chunk: dict[str, Any]) -> None:
        if isinstance(usage := chunk.get("usage"), dict):
            self.num_prompt_tokens = _count(usage.get("prompt_tokens"), self.num_prompt_tokens)
            self.num_output_tokens = _count(usage.get("completion_tokens"), self.num_output_tokens)
            details = usage.get("prompt_tokens_details")
            cached = details.get("cached_tokens") if isinstance(details, dict) else None
            self.num_cached_tokens = _count(cached, self.num_cached_tokens)
        elif isinstance(timings := chunk.get("timings"), dict):  # llama.cpp, where it sends no usage
            self.num_output_tokens = _count(timings.get("predicted_n"), self.num_output_tokens)

    def _end_of_json(self, now: float) -> None:
        """A body that is not a stream: an error, or the whole answer of a server that does not stream."""
        if self.http_status != 200:
            self.error = f"HTTP {self.http_status}: {_message_of_body(self._error_body)}"
            return
        self._chunk(self._error_body.strip(), now)
        if self.error is None and self.last_at is None:
            self.error = f"the body is not an answer: {_short(self._error_body)}"


def _has_text(line: bytes, marker: bytes) -> bool:
    """Whether a line certainly is a chunk with text and nothing else of interest."""
    return (
        _has_value(line, marker)
        and line.startswith(b"data:")
        and (_USAGE not in line or (line.count(_USAGE) == 1 and _NULL_USAGE.search(line) is not None))
    )


def _has_value(line: bytes, marker: bytes) -> bool:
    """Whether the text after the key is not empty."""
    place = line.find(marker) + len(marker)
    return len(marker) <= place < len(line) and line[place] != _QUOTE


def _has_content(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or choice.get("message")
    parts = delta if isinstance(delta, dict) else {}
    if choice.get("text") or any(isinstance(parts.get(key), str) and parts[key] for key in TEXT_KEYS):
        return True
    calls = [call for call in parts.get("tool_calls") or [] if isinstance(call, dict)]
    functions = [call.get("function") for call in calls] + [parts.get("function_call")]
    return any(isinstance(each, dict) and (each.get("name") or each.get("arguments")) for each in functions)


def _message_of_error(chunk: dict[str, Any]) -> str | None:
    """The message of an error object: OpenAI's, vLLM's older one, or plain text."""
    found: Any = chunk.get("error")
    if not found and chunk.get("object") == "error":
        found = chunk
    if not found:
        return None
    if isinstance(found, dict):
        found = found.get("message") or found.get("code") or found
    return _one_line(str(found))


def _message_of_body(body: bytes) -> str:
    decoded = _decoded(body)
    if isinstance(decoded, dict):
        if (message := _message_of_error(decoded)) is not None:
            return message
        for key in ("message", "detail"):  # FastAPI and others
            if decoded.get(key):
                return _one_line(str(decoded[key]))
    return _short(body) or "no message"


def _decoded(payload: bytes) -> Any:
    try:
        return msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _count(value: Any, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise


def _short(data: bytes) -> str:
    return _one_line(data[: 4 * MAX_ERROR_LEN].decode(errors="replace"))


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_ERROR_LEN else text[: MAX_ERROR_LEN - 1] + "…"
