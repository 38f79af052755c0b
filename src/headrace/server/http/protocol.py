"""uvicorn's httptools protocol, with the limits that it lacks.

httptools accepts headers of any length and number; uvicorn waits for the rest of a request, and for a client that does
not read, without a timeout. Here each of these has a limit, and a connection that exceeds one is closed.

This subclasses uvicorn's HttpToolsProtocol and uses parts of it that are not public API: pyproject.toml therefore
bounds uvicorn's version, and tests/server/http/test_protocol.py fails if one of these parts changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from headrace.server.http.errors import ApiError, error_body
from headrace.server.http.exchange import PART

CANCEL_AFTER_S = 1.0  # a handler gets `http.disconnect` when its client is gone; if it does not react, it is cancelled


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_header_bytes: int
    max_num_headers: int
    max_connections: int
    read_timeout_s: float
    write_timeout_s: float
    on_refused: Callable[[str], None]  # with the reason label for metrics


class _Stop(Exception):
    """Stops the parser on a connection; the reason is in the protocol."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection. `limits` is set by a subclass, since uvicorn creates protocol instances itself."""

    limits: ConnectionLimits

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_reading_head = True
        self._num_head_bytes = 0  # received of an incomplete head
        self._num_parsed_bytes = 0  # of it, already delivered by the parser
        self._ignores_input = False  # further input is dropped
        self._is_pipelining = False  # the client has sent its next request before the response (pipelining)
        self._error: ApiError | None = None
        self._head_alarm: asyncio.TimerHandle | None = None
        self._write_alarm: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def within(cls, limits: ConnectionLimits) -> type[GuardedProtocol]:
        return type("LimitedProtocol", (cls,), {"limits": limits})

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self.limits.on_refused("connections")
            self._ignores_input = True
            transport.abort()
            return
        self._set_head_alarm()

    def connection_lost(self, exc: Exception | None) -> None:
        for alarm in (self._head_alarm, self._write_alarm):
            if alarm is not None:
                alarm.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        if self._task is not None and not self._task.done():
            self.loop.call_later(CANCEL_AFTER_S, self._task.cancel)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._ignores_input:
            return
        try:
            self._feed(data)
            self._close_when_idle()
        except httptools.HttpParserUpgrade:
            self._ignores_input = True  # no upgrades are supported; the request itself is answered
            self._close_after_answer()
        except (httptools.HttpParserError, _Stop):
            self._ignores_input = True
            if self._is_pipelining or (self._is_answering and self.cycle.response_started):
                self._close_after_answer()
            else:
                self._refuse(self._error or ApiError(400, "this is not a valid HTTP request", code="bad_request"))

    def _close_when_idle(self) -> None:
        """Set the keep-alive timer again if the data began no request: a line end, or the rest of a refused body."""
        is_idle = self.cycle is not None and self.cycle.response_complete and self._head_alarm is None
        if is_idle and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _feed(self, data: bytes) -> None:
        self.parser.feed_data(data)
        if self._is_reading_head:
            # The parser delivers a header when it is complete; until then it grows inside the parser.
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self.limits.max_header_bytes:
                self._stop_at_long_headers()

    # ---- the parser's calls

    def on_message_begin(self) -> None:
        if self._is_answering:  # uvicorn would not notice its end while another request waits behind it
            self._is_pipelining = True
            raise _Stop
        super().on_message_begin()
        self._is_reading_head = True
        self._num_head_bytes = self._num_parsed_bytes = 0
        self._set_head_alarm()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value))
        if len(self.headers) > self.limits.max_num_headers:
            self._error = _too_large(f"there are more than {self.limits.max_num_headers:,} headers")
            raise _Stop

    def on_headers_complete(self) -> None:
        self._is_reading_head = False
        if self._head_alarm is not None:
            self._head_alarm.cancel()
            self._head_alarm = None
        super().on_headers_complete()

    def _count(self, num_bytes: int) -> None:
        self._num_parsed_bytes += num_bytes
        if self._num_parsed_bytes > self.limits.max_header_bytes:
            self._stop_at_long_headers()

    def _stop_at_long_headers(self) -> None:
        self._error = _too_large(f"the headers are longer than {self.limits.max_header_bytes:,} bytes")
        raise _Stop

    def _unsupported_upgrade_warning(self) -> None:
        pass

    # ---- responses

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cycle.scope[PART] = _Part(cycle)  # type: ignore[literal-required]
        if self.parser.get_http_version() == "1.0":
            app = _without_chunks(app, cycle)
        self._task = self.loop.create_task(cycle.run_asgi(_quiet(app, cycle)))
        self._task.add_done_callback(self.tasks.discard)
        self.tasks.add(self._task)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later()
        elif self._ignores_input:
            self._close()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._abort_later()

    def _close_after_answer(self) -> None:
        if self._is_answering:
            self.cycle.keep_alive = False
        else:
            self._close()

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
        self._abort_later()

    def _refuse(self, error: ApiError) -> None:
        """Respond without the application, and close."""
        self.limits.on_refused({431: "headers_too_large", 408: "timeout"}.get(error.status, "bad_request"))
        body = error_body(error)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        if self._is_answering:  # its handler learns that the client is gone
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not self.transport.is_closing():
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self._close()

    # ---- deadlines

    def _set_head_alarm(self) -> None:
        if self._head_alarm is None:
            self._head_alarm = self.loop.call_later(self.limits.read_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_alarm = None
        self._ignores_input = True
        if self._num_head_bytes == 0:
            self._close()
        else:
            self._refuse(
                ApiError(
                    408,
                    f"the headers did not come within {self.limits.read_timeout_s:g} seconds",
                    type="timeout_error",
                    code="read_timeout",
                )
            )

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_alarm is not None and not self.transport.is_closing():
            self._write_alarm.cancel()
            self._write_alarm = None

    def _abort_later(self) -> None:
        """Close the connection later if the client does not read what was written."""
        if self._write_alarm is None:
            self._write_alarm = self.loop.call_later(self.limits.write_timeout_s, self._write_is_late)

    def _write_is_late(self) -> None:
        self._write_alarm = None
        if self.transport.get_write_buffer_size():
            self.limits.on_refused("write_timeout")
        self.transport.abort()


class _Part:
    """Writes chunks of one streamed response; see `BodyPart`. Data for a client that is gone is dropped."""

    __slots__ = ("_cycle", "_flow")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow

    @property
    def can_be_written(self) -> bool:
        cycle = self._cycle
        return not (self._flow.write_paused or cycle.response_complete) and cycle.chunked_encoding is True

    def write(self, data: bytes) -> None:
        if not self._cycle.disconnected:
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def _quiet(app: Any, cycle: RequestResponseCycle) -> Any:
    """Wrap the application: a cancellation after the client is gone is not an error."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if not cycle.disconnected:
                raise

    return call


def _without_chunks(app: Any, cycle: RequestResponseCycle) -> Any:
    """Wrap the application for HTTP/1.0, which has no chunked encoding: a stream ends with its connection."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        is_stream = False

        async def send_plain(message: Any) -> None:
            nonlocal is_stream
            if message["type"] == "http.response.start":
                is_stream = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if is_stream:
                    cycle.chunked_encoding = False
            elif is_stream:  # uvicorn compares each part with the length that is left
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return call


def _too_large(message: str) -> ApiError:
    return ApiError(431, message, code="headers_too_large")
