"""The answers to one or more requests as they come, for one reader on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

from headrace.engine.answers import AnswerDelta, Answers
from headrace.engine.news import News
from headrace.errors import HeadraceError
from headrace.types import Request, RequestOutput, SequenceEvent

See = Callable[[int, SequenceEvent], None]


class FailedRequestError(HeadraceError):
    """The engine gave up one request, through no fault in what was asked."""


class Submits(Protocol):
    """The part of an `AsyncEngine` that a stream uses."""

    def listen(self, request: Request, news: News) -> None: ...
    def leave(self, request_id: str, *, abort: bool) -> None: ...
    def abort_one(self, request_id: str, index: int) -> None: ...


class AnswerStream:
    """Use it in a `with`: entering submits, and leaving before the end aborts what is unfinished.

    `see` is shown every event, with the position of its request, before it is taken in.
    """

    def __init__(self, engine: Submits, requests: Sequence[Answers], *, see: See | None = None) -> None:
        self._engine = engine
        self._requests = list(requests)
        self._positions = {answers.request.request_id: i for i, answers in enumerate(self._requests)}
        self._submitted: list[str] = []
        self._num_unfinished = len(self._requests)
        self._see = see
        self.news = News()

    def __enter__(self) -> AnswerStream:
        try:
            for answers in self._requests:
                self._engine.listen(answers.request, self.news)
                self._submitted.append(answers.request.request_id)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    @property
    def is_finished(self) -> bool:
        return self._num_unfinished == 0

    @property
    def requests(self) -> list[Answers]:
        return self._requests

    async def deltas(self) -> list[tuple[int, AnswerDelta]]:
        """What is new, with the position of its request; nothing if the reader was only woken."""
        changed = await self._take()
        if len(changed) == 1:
            position = changed[0]
            return [(position, delta) for delta in self._requests[position].take_deltas()]
        return [(position, delta) for position in changed for delta in self._requests[position].take_deltas()]

    async def outputs(self) -> list[RequestOutput]:
        """All answers, once they are whole."""
        while not self.is_finished:
            await self._take()
        return [answers.output() for answers in self._requests]

    async def _take(self) -> list[int]:
        """Wait for events and take them in; the positions of the requests they were about."""
        changed: dict[int, None] = {}
        for event in await self.news.take():
            position = self._positions[event.request_id]
            answers = self._requests[position]
            if answers.is_finished:
                continue
            changed[position] = None
            if self._see is not None:
                self._see(position, event)
            progress = answers.take(event)
            if progress.stopped_index is not None:
                self._engine.abort_one(event.request_id, progress.stopped_index)
            if progress.is_finished:
                self._num_unfinished -= 1
                if answers.error is not None:
                    raise FailedRequestError(answers.error)
        return list(changed)

    def _leave(self) -> None:
        for request_id in self._submitted:
            answers = self._requests[self._positions[request_id]]
            self._engine.leave(request_id, abort=not answers.is_finished)
        self._submitted.clear()
