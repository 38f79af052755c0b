"""`ReadoutStream`: waits for the embeddings or scores of one or more prompts, for one reader on the event loop."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engine.readouts import PendingReadout
from headrace.engine.submission import EventSource, OnTiming, Submission
from headrace.errors import FailedRequestError
from headrace.types import SequenceEvent


class ReadoutStream(Submission):
    """`on_timing` is called with the position of the request and its event, before the event is processed. A readout
    has one event, at its end."""

    def __init__(
        self, engine: EventSource, pending: Sequence[PendingReadout], *, on_timing: OnTiming | None = None
    ) -> None:
        self._readouts = list(pending)
        super().__init__(engine, self._readouts)
        self._unfinished = {one.request.request_id: position for position, one in enumerate(self._readouts)}
        self._on_timing = on_timing

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
        one = self._readouts[position]
        if one.take(event).is_finished:
            del self._unfinished[event.request_id]
        if one.error is not None:
            raise FailedRequestError(one.error)
