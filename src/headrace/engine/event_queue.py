"""`EventQueue`: sequence events on their way from the engine to one reader on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.types import SequenceEvent


class EventQueue:
    """Holds events for one reader, which is woken once for many events. Used on the event loop thread only.

    `read_now`, if set, is called first while the reader waits. It may process the events without waking the reader's
    task, and returns True if the task need not be woken.
    """

    __slots__ = ("_ending", "_events", "_loop", "_waiter", "read_now")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: list[SequenceEvent] = []
        self._waiter: asyncio.Future[None] | None = None
        self._ending: Exception | None = None
        self.read_now: Callable[[], bool] | None = None

    def put(self, event: SequenceEvent) -> bool:
        """Add an event. Returns True if the reader waits and must be notified after the last `put`."""
        self._events.append(event)
        return self._waiter is not None and len(self._events) == 1

    def notify(self) -> None:
        """Let the waiting reader process the new events."""
        if self.read_now is None or self._waiter is None:
            self.wake()
            return
        try:
            is_done = self.read_now()
        except Exception as error:  # noqa: BLE001  an error in this reader must not reach the others
            self.end(error)
        else:
            if not is_done:
                self.wake()

    def end(self, error: Exception) -> None:
        """Raise this error in the reader, now or at its next read. Later errors are ignored."""
        self._ending = self._ending or error
        self.wake()

    def wake(self) -> None:
        """Wake the reader, even without events."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def take(self) -> list[SequenceEvent]:
        """Wait for events and return all of them. The list is empty if the reader was woken without events."""
        if (waiter := self.waiter()) is not None:
            await waiter
        return self.take_now()

    def waiter(self) -> asyncio.Future[None] | None:
        """Return a future that is done when there is something to read, or None if there is already.

        The reader must await it at once.
        """
        if self._events or self._ending is not None:
            return None
        self._waiter = self._loop.create_future()
        return self._waiter

    def take_now(self) -> list[SequenceEvent]:
        if self._ending is not None:
            raise self._ending
        events, self._events = self._events, []
        return events
