"""Streams as servers write them: each with the number of chunks with text and what a client must read from it."""

from __future__ import annotations

import json
from typing import Any


def event(line_end: str = "\n", **body: Any) -> bytes:
    return f"data: {json.dumps(body, separators=(',', ':'))}{line_end}{line_end}".encode()


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "text": value, "finish_reason": None}], **more}


def delta(finish_reason: str | None = None, **parts: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "delta": parts, "finish_reason": finish_reason}]}


USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}
END = {"id": "c", "choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
DONE = b"data: [DONE]\n\n"

# Texts that look like the parts of a stream.
NASTY = [
    '"usage":{"completion_tokens":99}',
    "[DONE]",
    "data: [DONE]\n\n",
    '","usage":1',
    '"text":"',
    "\\",
    '"',
    "héé\r\n",
]

COMPLETION = b"".join(event(**text(f" {n}")) for n in range(5)) + event(**END) + event(choices=[], usage=USAGE) + DONE
CRLF = (
    b"".join(event("\r\n", **text(f" {n}")) for n in range(5))
    + event("\r\n", **END)
    + event("\r\n", choices=[], usage=USAGE)
    + b"data: [DONE]\r\n\r\n"
)
NASTY_COMPLETION = (
    b"".join(event(**text(each)) for each in NASTY) + event(**END) + event(choices=[], usage=USAGE) + DONE
)
# Python's default separators, usage null in each chunk, a comment, an event's name.
SPACED = (
    b": ping\n\n"
    + b"".join(b"event: x\ndata: " + json.dumps(text(f" {n}", usage=None)).encode() + b"\n\n" for n in range(5))
    + b"data: "
    + json.dumps({**END, "usage": USAGE}).encode()
    + b"\n\n"
    + DONE
)
CHAT = (
    event(**delta(role="assistant", content=""))
    + event(**delta(reasoning_content="Hm", content=None))
    + event(**delta(reasoning_content=".", content=None))
    + event(**delta(content="Yes"))
    + event(**delta(content="."))
    + event(**delta(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": ""}}]))
    + event(**delta(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}]))
    + event(**delta("tool_calls"))
    + event(choices=[], usage=USAGE)
    + DONE
)
# name: (stream, number of chunks with text)
STREAMS = {
    "completion": (COMPLETION, 5),
    "crlf": (CRLF, 5),
    "nasty": (NASTY_COMPLETION, len(NASTY)),
    "spaced": (SPACED, 5),
    "chat": (CHAT, 6),
}


def chunked(body: bytes, size: int) -> bytes:
    """HTTP/1.1's chunked encoding, in chunks of this size."""
    pieces = [body[place : place + size] for place in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def sized(status: int, body: bytes, content_type: str = "application/json", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body
