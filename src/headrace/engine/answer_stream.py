"""`AnswerStream`: the answers of one or more requests as they grow, for one reader on the event loop."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engine.answers import UNFINISHED, AnswerDelta, Answers, Progress
from headrace.engine.submission import EventSource, OnTiming, Submission
from headrace.errors import FailedRequestError
from headrace.types import RequestOutput, SequenceEvent


class AnswerStream(Submission):
    """`on_timing` is called with the position of the request and each event that carries times (the first and the last
    of a sequence), before the event is processed."""

    def __init__(self, engine: EventSource, requests: Sequence[Answers], *, on_timing: OnTiming | None = None) -> None:
        self._requests = list(requests)
        super().__init__(engine, self._requests)
        self._only = self._requests[0] if len(self._requests) == 1 else None
        self._unfinished = {answers.request.request_id: answers for answers in self._requests}
        self.is_finished = not self._unfinished
        for position, answers in enumerate(self._requests):
            answers.position = position
        self._on_timing = on_timing

    @property
    def requests(self) -> list[Answers]:
        return self._requests

    async def deltas(self) -> list[AnswerDelta]:
        """Wait for new deltas. The list is empty if the reader was woken without events."""
        if (waiter := self.event_queue.waiter()) is not None:
            await waiter
        return self.take_deltas()

    def take_deltas(self) -> list[AnswerDelta]:
        """Return the deltas that have arrived, without waiting."""
        events = self.event_queue.take_now()
        if self._only is None:
            return [delta for answers in self._take(events) for delta in answers.take_deltas()]
        for event in events:
            self._take_one(self._only, event)
        return self._only.take_deltas() if events else []

    async def outputs(self) -> list[RequestOutput]:
        """Wait until all requests are finished and return their outputs."""
        while not self.is_finished:
            self._take(await self.event_queue.take())
        return [answers.output() for answers in self._requests]

    def _take(self, events: list[SequenceEvent]) -> list[Answers]:
        """Process events and return the requests that changed, each once."""
        changed: dict[int, Answers] = {}
        for event in events:
            answers = self._unfinished.get(event.request_id)
            if answers is not None:
                changed[answers.position] = answers
                self._take_one(answers, event)
        return list(changed.values())

    def _take_one(self, answers: Answers, event: SequenceEvent) -> None:
        """Process one event. Runs for every token."""
        if event.timing is not None and self._on_timing is not None:
            self._on_timing(answers.position, event)
        progress = answers.take(event)
        if progress is not UNFINISHED:
            self._take_end(answers, progress)

    def _take_end(self, answers: Answers, progress: Progress) -> None:
        if progress.stopped_index is not None:
            self._engine.abort_one(answers.request.request_id, progress.stopped_index)
        if progress.is_finished and self._unfinished.pop(answers.request.request_id, None) is not None:
            self.is_finished = not self._unfinished
            if answers.error is not None:
                raise FailedRequestError(answers.error)
