"""HTTP/1.1 on an asyncio protocol: one streamed request after the other on a connection.

Connections end a request in one of three ways: the body is complete, the connection is lost, or its time is over.
The verdict is in the answer; waiting for a request never raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools

from headrace.bench.load.answer import Answer


class Connection(asyncio.Protocol):
    """One connection. `is_reusable` after a request says whether it may send another."""

    def __init__(self, clock: Callable[[], float], on_bytes: Callable[[float], None] | None = None) -> None:
        self._clock, self._on_bytes = clock, on_bytes
        self._transport: Any = None
        self._parser: Any = None
        self._answer: Answer | None = None  # of the request in flight
        self._ended: asyncio.Future[None] | None = None
        self._content_type = b""
        self._now = 0.0  # when the bytes at hand arrived
        self._ends_with_close = True  # the body has no length: closing the connection ends it
        self.is_reusable = True
        self.num_bytes = 0  # of the response in flight: 0 until it begins

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._parser = httptools.HttpResponseParser(self)

    def ask(self, request: bytes, answer: Answer) -> asyncio.Future[None]:
        """Send a request. The future ends with the answer, whatever became of it."""
        assert self._ended is None or self._ended.done()
        self._answer, self.num_bytes = answer, 0
        self._ended = asyncio.get_running_loop().create_future()
        if self._transport is None or self._transport.is_closing():
            self._fail("the connection was closed")
        else:
            self._transport.write(request)
        return self._ended

    def give_up(self, error: str) -> None:
        """End the request in flight with an error, and the connection."""
        self._fail(error)
        self.close()

    def close(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio's calls

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        self.num_bytes += len(data)
        if self._on_bytes is not None:
            self._on_bytes(self._now)
        if self._answer is None:  # bytes that nobody asked for
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.give_up(f"the response is not HTTP/1.1: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.is_reusable = False
        answer = self._answer
        if answer is None:
            return
        if answer.http_status is not None and (self._ends_with_close or answer.is_done):
            answer.end(self._clock())
            self._finish()
        elif answer.http_status is None:
            self._fail(f"the server closed the connection without a response{_because(error)}")
        else:
            self._fail(f"the server closed the connection in the middle of the answer{_because(error)}")

    # the parser's calls

    def on_message_begin(self) -> None:
        self._content_type, self._ends_with_close = b"", True

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower == b"content-type":
            self._content_type = value
        elif lower in (b"content-length", b"transfer-encoding"):
            self._ends_with_close = False

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self._answer is not None:
            self._answer.start(status, self._content_type)

    def on_body(self, data: bytes) -> None:
        if self._answer is not None:
            self._answer.feed(data, self._now)

    def on_message_complete(self) -> None:
        if self._answer is None or self._answer.http_status is None:  # 1xx: the response is still to come
            return
        self.is_reusable = self.is_reusable and self._parser.should_keep_alive()
        self._answer.end(self._now)
        self._finish()
        if not self.is_reusable:
            self.close()

    def _fail(self, error: str) -> None:
        self.is_reusable = False
        if self._answer is not None:
            self._answer.error = self._answer.error or error
            self._finish()

    def _finish(self) -> None:
        self._answer = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


def _because(error: Exception | None) -> str:
    return f" ({error.strerror or error})" if isinstance(error, OSError) else f" ({error})" if error else ""
