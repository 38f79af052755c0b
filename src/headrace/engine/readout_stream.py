"""`ReadoutStream`: waits for the embeddings or scores of one or more prompts, for one reader on the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from headrace.engine.answer_stream import EventSource, OnTiming
from headrace.engine.event_queue import EventQueue
from headrace.engine.readouts import PendingReadout
from headrace.errors import FailedRequestError
from headrace.types import SequenceEvent


class ReadoutStream:
    """A context manager: entering submits the requests, and leaving aborts those that are unfinished.

    `on_timing` is called with the position of the request and its event, before the event is processed. A readout has
    one event, at its end.
    """

    def __init__(
        self, engine: EventSource, pending: Sequence[PendingReadout], *, on_timing: OnTiming | None = None
    ) -> None:
        self._engine = engine
        self._pending = list(pending)
        self._unfinished = {one.request.request_id: position for position, one in enumerate(self._pending)}
        self._submitted: list[PendingReadout] = []
        self._on_timing = on_timing
        self.event_queue = EventQueue()

    def __enter__(self) -> ReadoutStream:
        try:
            for one in self._pending:
                self._engine.subscribe(one.request, self.event_queue)
                self._submitted.append(one)
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    async def wait(self) -> None:
        """Wait until all requests are finished, or until one has failed, which is raised."""
        while self._unfinished:
            for event in await self.event_queue.take():
                self._take(event)

    def _take(self, event: SequenceEvent) -> None:
        position = self._unfinished.get(event.request_id)
        if position is None:
            return
        if event.timing is not None and self._on_timing is not None:
            self._on_timing(position, event)
        one = self._pending[position]
        if one.take(event).is_finished:
            del self._unfinished[event.request_id]
        if one.error is not None:
            raise FailedRequestError(one.error)

    def _release(self) -> None:
        for one in self._submitted:
            self._engine.unsubscribe(one.request.request_id, abort=not one.is_finished)
        self._submitted.clear()
