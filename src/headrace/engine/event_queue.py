"""What an engine has to say to one reader: requests of an event loop, read together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.types import SequenceEvent


class EventQueue:
    """Events on their way to one reader. Used on the event loop only; its one reader is woken once for many events.

    `read_now`, if it is set, is asked first while the reader waits: it may take what has come without waking anybody,
    and says whether that was all there was to do.
    """

    __slots__ = ("_ending", "_events", "_loop", "_waiter", "read_now")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: list[SequenceEvent] = []
        self._waiter: asyncio.Future[None] | None = None
        self._ending: Exception | None = None
        self.read_now: Callable[[], bool] | None = None

    def put(self, event: SequenceEvent) -> bool:
        """Whether the reader is to be told, once all is put that there is."""
        self._events.append(event)
        return self._waiter is not None and len(self._events) == 1

    def tell(self) -> None:
        """There are events for a reader that waits."""
        if self.read_now is None or self._waiter is None:
            self.wake()
            return
        try:
            is_done = self.read_now()
        except Exception as error:  # noqa: BLE001  what fails in one reader's place is for that reader
            self.end(error)
        else:
            if not is_done:
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
