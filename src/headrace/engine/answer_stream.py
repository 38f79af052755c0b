"""The answers to one or more requests as they come, for one reader on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

from headrace.engine.answers import GOES_ON, AnswerDelta, Answers, Progress
from headrace.engine.event_queue import EventQueue
from headrace.errors import HeadraceError
from headrace.types import Request, RequestOutput, SequenceEvent

See = Callable[[int, SequenceEvent], None]


class FailedRequestError(HeadraceError):
    """The engine gave up one request, through no fault in what was asked."""


class Submits(Protocol):
    """The part of an `AsyncEngine` that a stream uses."""

    def listen(self, request: Request, event_queue: EventQueue) -> None: ...
    def leave(self, request_id: str, *, abort: bool) -> None: ...
    def abort_one(self, request_id: str, index: int) -> None: ...


class AnswerStream:
    """Use it in a `with`: entering submits, and leaving before the end aborts what is unfinished.

    `see` is shown the events with times, the first of a sequence and its last, with the position of their request,
    before they are taken in.
    """

    def __init__(self, engine: Submits, requests: Sequence[Answers], *, see: See | None = None) -> None:
        self._engine = engine
        self._requests = list(requests)
        self._only = self._requests[0] if len(self._requests) == 1 else None
        self._unfinished = {answers.request.request_id: answers for answers in self._requests}
        self.is_finished = not self._unfinished
        for position, answers in enumerate(self._requests):
            answers.position = position
        self._submitted: list[Answers] = []
        self._see = see
        self.event_queue = EventQueue()

    def __enter__(self) -> AnswerStream:
        try:
            for answers in self._requests:
                self._engine.listen(answers.request, self.event_queue)
                self._submitted.append(answers)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    @property
    def requests(self) -> list[Answers]:
        return self._requests

    async def deltas(self) -> list[AnswerDelta]:
        """What is new; nothing if the reader was only woken."""
        if (waiter := self.event_queue.waiter()) is not None:
            await waiter
        return self.take_deltas()

    def take_deltas(self) -> list[AnswerDelta]:
        """What is new by now."""
        events = self.event_queue.take_now()
        if self._only is None:
            return [delta for answers in self._take(events) for delta in answers.take_deltas()]
        for event in events:
            self._take_one(self._only, event)
        return self._only.take_deltas() if events else []

    async def outputs(self) -> list[RequestOutput]:
        """All answers, once they are whole."""
        while not self.is_finished:
            self._take(await self.event_queue.take())
        return [answers.output() for answers in self._requests]

    def _take(self, events: list[SequenceEvent]) -> list[Answers]:
        """Take events in; the requests they were about, each once."""
        changed: dict[int, Answers] = {}
        for event in events:
            answers = self._unfinished.get(event.request_id)
            if answers is not None:
                changed[answers.position] = answers
                self._take_one(answers, event)
        return list(changed.values())

    def _take_one(self, answers: Answers, event: SequenceEvent) -> None:
        """This runs for every token."""
        if event.timing is not None and self._see is not None:
            self._see(answers.position, event)
        progress = answers.take(event)
        if progress is not GOES_ON:
            self._take_end(answers, progress)

    def _take_end(self, answers: Answers, progress: Progress) -> None:
        if progress.stopped_index is not None:
            self._engine.abort_one(answers.request.request_id, progress.stopped_index)
        if progress.is_finished and self._unfinished.pop(answers.request.request_id, None) is not None:
            self.is_finished = not self._unfinished
            if answers.error is not None:
                raise FailedRequestError(answers.error)

    def _leave(self) -> None:
        for answers in self._submitted:
            self._engine.leave(answers.request.request_id, abort=not answers.is_finished)
        self._submitted.clear()
