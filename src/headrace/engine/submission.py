"""Requests that are submitted together and read by one reader on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from headrace.engine.event_queue import EventQueue
from headrace.types import Request, SequenceEvent

OnTiming = Callable[[int, SequenceEvent], None]


class EventSource(Protocol):
    """The part of an `AsyncEngine` that a reader uses."""

    def subscribe(self, request: Request, event_queue: EventQueue) -> None: ...
    def unsubscribe(self, request_id: str, *, abort: bool) -> None: ...
    def abort_one(self, request_id: str, index: int) -> None: ...


class Pending(Protocol):
    """A request whose events are read here."""

    @property
    def request(self) -> Request: ...
    @property
    def is_finished(self) -> bool: ...


class Submission:
    """A context manager: entering submits the requests, and leaving aborts those that are unfinished."""

    def __init__(self, engine: EventSource, pending: Sequence[Pending]) -> None:
        self._engine = engine
        self._pending = pending
        self._submitted: list[Pending] = []
        self.event_queue = EventQueue()

    def __enter__(self) -> Self:
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

    def _release(self) -> None:
        for one in self._submitted:
            self._engine.unsubscribe(one.request.request_id, abort=not one.is_finished)
        self._submitted.clear()
