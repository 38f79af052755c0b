"""Server-sent events: data lines, keep-alive comments during silence, and a proper end.

The status line is sent with the first event, so that a failure before it still gets its own status code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType

from headrace.engine.answer_stream import AnswerStream
from headrace.engine.answers import AnswerDelta
from headrace.engine.event_queue import EventQueue
from headrace.server.http.errors import ApiError, error_body
from headrace.server.http.exchange import Exchange

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not buffer events
]


def data(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"


class EventStream:
    """Use it in a `with`. If nothing is sent for `interval_s`, the reader is woken and a comment sent."""

    def __init__(self, exchange: Exchange, event_queue: EventQueue, interval_s: float) -> None:
        self._exchange = exchange
        self._send = exchange.send
        self._part = exchange.part
        self._event_queue = event_queue
        self._interval_s = interval_s
        self._has_begun = False
        self._num_sent = 0
        self._num_seen = -1  # number of events sent at the last check
        self._timer: asyncio.TimerHandle | None = None
        self._is_silent = False

    def __enter__(self) -> EventStream:
        self._check_silence()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check_silence(self) -> None:
        if not self._interval_s:
            return
        if self._num_seen == self._num_sent:
            self._is_silent = True
            self._event_queue.wake()
        self._num_seen = self._num_sent
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._check_silence)

    def send(self, events: bytes) -> Awaitable[None]:
        """One or more whole events."""
        self._num_sent += 1
        if self._has_begun:
            return self._send({"type": "http.response.body", "body": events, "more_body": True})
        return self._begin_with(events)

    async def _begin_with(self, events: bytes) -> None:
        await self._begin()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def follow(self, stream: AnswerStream, write: Callable[[AnswerDelta], bytes]) -> None:
        """Send all events, encoded by `write`, until the answers end.

        Most events are written where they arrive, without this task. It handles the first event, the end, silence, and
        a client that reads slowly.
        """
        event_queue = stream.event_queue
        event_queue.read_now = partial(self._write_now, stream, write)
        while not stream.is_finished:
            if (waiter := event_queue.waiter()) is not None:
                await waiter
            if events := _written(stream, write):
                await self.send(events)
            elif self._is_silent:
                await self.keep_alive()

    async def keep_alive(self) -> None:
        """Send a comment if nothing was sent for a while."""
        if self._is_silent:
            self._is_silent = False
            await self.send(KEEP_ALIVE)

    def _write_now(self, stream: AnswerStream, write: Callable[[AnswerDelta], bytes]) -> bool:
        """Write new events without waking the task, if the client reads fast enough. Returns whether all is written."""
        part = self._part
        if not (self._has_begun and part is not None and part.can_be_written):
            return False
        if events := _written(stream, write):
            self._num_sent += 1
            part.write(events)
        return not stream.is_finished

    async def end(self, events: bytes = b"", *, done: bytes = DONE) -> None:
        if not self._has_begun:
            await self._begin()
        await self._send({"type": "http.response.body", "body": events + done})

    async def _begin(self) -> None:
        self._exchange.status = 200
        self._has_begun = True
        if self._exchange.fail_stream is None:
            self._exchange.fail_stream = self._fail
        more = [(name.encode(), value.encode()) for name, value in self._exchange.load_report().items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, *more]})

    async def _fail(self, error: ApiError) -> None:
        await self.end(data(error_body(error)))


def _written(stream: AnswerStream, write: Callable[[AnswerDelta], bytes]) -> bytes:
    deltas = stream.take_deltas()
    return write(deltas[0]) if len(deltas) == 1 else b"".join(map(write, deltas))
