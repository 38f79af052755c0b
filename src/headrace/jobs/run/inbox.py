"""The messages that a job's main loop waits for: prepared lines, events of the engine, requests to stop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from queue import Empty, SimpleQueue

from headrace.jobs.input.feed import InputEnded, InputFailed, Prepared
from headrace.jobs.run.stop_state import StopRequest
from headrace.types import SequenceEvent

Message = list[SequenceEvent] | Prepared | InputEnded | InputFailed | StopRequest
Inbox = SimpleQueue[Message]


class InboxReader:
    """The reading end of an inbox. Used by one thread."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._kept: deque[Message] = deque()  # read from the inbox by `take_events`, and not yet taken

    def take(self, *, timeout_s: float) -> Message | None:
        if self._kept:
            return self._kept.popleft()
        try:
            return self._inbox.get(timeout=timeout_s)
        except Empty:
            return None

    def take_more(self, max_messages: int) -> Iterator[Message]:
        """Messages that have arrived, without waiting for any."""
        for _ in range(min(max_messages, len(self._kept) + self._inbox.qsize())):
            yield self._kept.popleft() if self._kept else self._inbox.get()

    def take_events(self) -> list[list[SequenceEvent]]:
        """All event lists that have arrived. Other messages stay, in their order."""
        self._kept.extend(self._inbox.get() for _ in range(self._inbox.qsize()))
        events = [message for message in self._kept if isinstance(message, list)]
        self._kept = deque(message for message in self._kept if not isinstance(message, list))
        return events
