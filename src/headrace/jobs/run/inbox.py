"""What a job's run waits for: the reader's lines, the engine's events, and the wish that it may stop."""

from __future__ import annotations

from collections import deque
from queue import Empty, SimpleQueue

from headrace.jobs.input.feed import InputEnded, InputFailed, Prepared
from headrace.jobs.run.stopping import Stop
from headrace.types import SequenceEvent

Message = list[SequenceEvent] | Prepared | InputEnded | InputFailed | Stop
Inbox = SimpleQueue[Message]


class Incoming:
    """The end of an inbox from which one thread takes."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._kept: deque[Message] = deque()  # taken out, and still to be looked at

    def take(self, *, at_most_s: float) -> Message | None:
        if self._kept:
            return self._kept.popleft()
        try:
            return self._inbox.get(timeout=at_most_s)
        except Empty:
            return None

    def take_events(self) -> list[list[SequenceEvent]]:
        """All that engines have said by now. The messages of others stay in their order."""
        self._kept.extend(self._inbox.get() for _ in range(self._inbox.qsize()))
        events = [message for message in self._kept if isinstance(message, list)]
        self._kept = deque(message for message in self._kept if not isinstance(message, list))
        return events
