"""What an engine has to say to one reader: requests of an event loop, read together."""

from __future__ import annotations

import asyncio

from headrace.types import SequenceEvent


class News:
    """Events on their way to one reader. Used on the event loop only; its one reader is woken once for many events."""

    __slots__ = ("_ending", "_events", "_loop", "_waiter")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: list[SequenceEvent] = []
        self._waiter: asyncio.Future[None] | None = None
        self._ending: Exception | None = None

    def put(self, event: SequenceEvent) -> None:
        self._events.append(event)
        if self._waiter is not None:
            self.wake()

    def end(self, error: Exception) -> None:
        """The reader gets this error, now or when it next asks; the first one counts."""
        self._ending = self._ending or error
        self.wake()

    def wake(self) -> None:
        """Let the reader go on, even without events."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def take(self) -> list[SequenceEvent]:
        """Wait for events, and take all that have come; none if the reader was only woken."""
        if (waiter := self.waiter()) is not None:
            await waiter
        return self.take_now()

    def waiter(self) -> asyncio.Future[None] | None:
        """Done when there is something to take; None if there is already. For the one reader, who awaits it at once."""
        if self._events or self._ending is not None:
            return None
        self._waiter = self._loop.create_future()
        return self._waiter

    def take_now(self) -> list[SequenceEvent]:
        if self._ending is not None:
            raise self._ending
        events, self._events = self._events, []
        return events
