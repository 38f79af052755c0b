"""Responses in the background: generated whether or not a client is connected."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from typing import Any

from headrace.engine.answer_stream import AnswerStream
from headrace.engine.answers import Answers
from headrace.engine.event_queue import EventQueue
from headrace.errors import HeadraceError
from headrace.openai.responses import ResponseWriter
from headrace.openai.usage import Usage
from headrace.server.endpoints.generation import running
from headrace.server.endpoints.response_events import ResponseEvents
from headrace.server.http.errors import ApiError, from_headrace, internal_error, without_message
from headrace.server.http.exchange import Exchange
from headrace.server.http.sse import EventStream
from headrace.server.response_store import StoredResponse
from headrace.server.services import Reservation, Services

log = logging.getLogger("headrace.server")


class BackgroundRun:
    """Generates one stored response, and keeps its events for clients that follow it, now or later."""

    def __init__(
        self, services: Services, writer: ResponseWriter, stored: StoredResponse, answers: Answers, held: ExitStack
    ) -> None:
        self._services = services
        self._writer = writer
        self._stored = stored
        self._answers = answers
        self._held = held
        self._events = ResponseEvents(writer, starts_queued=True)
        self._log: list[bytes] = []  # the event of each number
        self._followers: set[EventQueue] = set()
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self._is_done = False

    def start(self, exchange: Exchange, *, reservation: Reservation, arrived: float) -> None:
        """`exchange`: that of the request, whose deadline and key apply."""
        self._write(self._events.queued())
        self._task = asyncio.create_task(self._run(exchange.detached(), reservation, arrived))
        self._services.background.add(self._task)
        self._task.add_done_callback(self._services.background.discard)

    async def cancel(self) -> None:
        """Ends it; no effect once it is done."""
        if self._task is None or self._is_done:
            return
        self._is_cancelled = True
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._is_done:  # the task was cancelled before it ran
            self._held.close()
            self._finish_cancelled()

    async def follow(self, exchange: Exchange, *, after: int = -1) -> None:
        """Send the events after that number, and the following ones as they come."""
        queue, position = EventQueue(), after + 1
        self._followers.add(queue)
        interval_s = self._services.options.sse_keep_alive_interval_s
        try:
            with exchange.watched_by(queue), EventStream(exchange, queue, interval_s) as events:
                while position < len(self._log) or not self._is_done:
                    if new := self._log[position:]:
                        position += len(new)
                        await events.send(b"".join(new))
                    elif (waiter := queue.waiter()) is not None:
                        await waiter
                        await events.keep_alive()
                    queue.take_now()  # raises if the client has gone
                await events.end(done=b"")
        finally:
            self._followers.discard(queue)

    async def _run(self, away: Exchange, reservation: Reservation, arrived: float) -> None:
        self._services.num_in_flight += 1
        try:
            with self._held:
                async with running(self._services, away, [self._answers], reservation, arrived=arrived) as stream:
                    await self._generate(stream)
        except asyncio.CancelledError:
            if not self._is_cancelled:
                self._fail(ApiError(503, "the server was stopped"))
                raise
            self._finish_cancelled()
        except HeadraceError as error:
            self._fail(from_headrace(error))
        except Exception as error:  # the edge of a request without a client
            log.error("%s in a response in the background", type(error).__name__, exc_info=without_message(error))
            self._fail(internal_error())
        finally:
            self._services.num_in_flight -= 1

    async def _generate(self, stream: AnswerStream) -> None:
        while not stream.is_finished:
            if deltas := await stream.deltas():
                if self._stored.status == "queued":
                    self._services.responses.change(self._stored, self._writer.response("in_progress", []))
                self._write(b"".join(map(self._events.delta, deltas)))
        output = stream.requests[0].output()
        self._finish(*self._events.end(output.outputs[0], Usage.of([output])))

    def _fail(self, error: ApiError) -> None:
        self._finish(*self._events.failed(error))

    def _finish_cancelled(self) -> None:
        self._finish(b"", self._writer.response("cancelled", []))

    def _finish(self, events: bytes, response: dict[str, Any]) -> None:
        self._is_done = True
        self._write(events)
        num_bytes = sum(map(len, self._log)) + len(events)  # the last event has the response
        self._services.responses.change(self._stored, response, num_bytes=num_bytes)

    def _write(self, events: bytes) -> None:
        self._log += [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]
        self._wake()

    def _wake(self) -> None:
        for queue in self._followers:
            queue.wake()
