"""`EventDispatch`: events from the threads of one or more engines to their readers on the event loop.

engine's threads   deliver(events), lose(engine) ─▶ other fronts, by the start of the request id (`SharedClient`)
                                               └──▶ one callback for all that the loop has not processed yet
event loop         dispatch ─▶ the reader of each request
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from headrace.engine.event_queue import EventQueue
from headrace.engine.shared_client import SHARED, SharedClient
from headrace.errors import EngineDeadError
from headrace.types import SequenceEvent


class _Loss(NamedTuple):
    """An engine has died."""

    failure: BaseException
    engine: int | None = None  # its number, where there are several; None: there is only one


class EventDispatch:
    """Owns the readers, which only the event loop's thread may change. `failure` says why the engine accepts no
    requests, `requests_at` which requests run on one of several engines."""

    def __init__(
        self, *, failure: Callable[[], BaseException | None], requests_at: Callable[[int], Iterable[str]]
    ) -> None:
        self.readers: dict[str, EventQueue] = {}  # of running requests
        self._failure = failure
        self._requests_at = requests_at
        self._loop: asyncio.AbstractEventLoop | None = None
        self._delivered: deque[tuple[list[SequenceEvent], _Loss | None]] = deque()
        self._is_scheduled = False  # whether `_dispatch` is scheduled on the loop
        self._shared: dict[str, SharedClient] = {}  # by prefix; replaced, never changed: other threads read it

    def use_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver events to this loop from now on. Events for an earlier loop are dropped, its readers are gone."""
        if loop is not self._loop:
            self._loop = loop
            self._delivered.clear()
            self._is_scheduled = False

    def share(self, client: SharedClient) -> None:
        """Events of this client's requests go to it from now on."""
        self._shared = {**self._shared, client.prefix: client}

    def unshare(self, client: SharedClient) -> None:
        self._shared = {prefix: other for prefix, other in self._shared.items() if other is not client}

    # ---- on the engines' threads

    def deliver(self, events: list[SequenceEvent]) -> None:
        """Pass the events of a step to the event loop. No events: the engine has failed."""
        if self._shared:
            own = self._without_shared(events)
            if events and not own:
                return
            events = own
        if events or self._loop is None:
            self._pass_on(events, None)
            return
        failure = self._failure()  # now: the engine may be back before the loop runs
        self._pass_on(events, None if failure is None else _Loss(failure))

    def lose(self, engine: int, failure: BaseException) -> None:
        """One of several engines has died."""
        for client in self._shared.values():
            if client.engine == engine:
                client.fail(failure)
        self._pass_on([], _Loss(failure, engine))

    def _pass_on(self, events: list[SequenceEvent], loss: _Loss | None) -> None:
        """Steps that the loop has not processed yet share one callback."""
        if self._loop is None or self._loop.is_closed():
            return
        self._delivered.append((events, loss))
        if self._is_scheduled:
            return
        self._is_scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._dispatch)
        except RuntimeError:
            pass  # the loop was closed meanwhile, and its readers are gone

    def _without_shared(self, events: list[SequenceEvent]) -> list[SequenceEvent]:
        """Deliver the events of other fronts to them, and return the rest. No events: the engine has failed."""
        shared = self._shared
        if not events:
            for client in shared.values():
                client.fail(self._failure())
            return events
        own, others = [], defaultdict[str, list[SequenceEvent]](list)
        for event in events:
            if event.request_id.startswith(SHARED):
                others[event.request_id[: event.request_id.index("/") + 1]].append(event)
            else:
                own.append(event)
        for prefix, theirs in others.items():
            if prefix in shared:
                shared[prefix].take(theirs)
        return own

    # ---- on the event loop

    def _dispatch(self) -> None:
        self._is_scheduled = False  # first: what is delivered from here on schedules another call
        to_notify: list[EventQueue] = []
        while self._delivered:
            events, loss = self._delivered.popleft()
            for event in events:
                event_queue = self.readers.get(event.request_id)
                if event_queue is not None and event_queue.put(event):
                    to_notify.append(event_queue)
            if loss is not None:
                for event_queue in self._readers_of(loss):
                    event_queue.end(EngineDeadError(f"the engine has stopped: {loss.failure}"))
        for event_queue in to_notify:
            event_queue.notify()

    def _readers_of(self, loss: _Loss) -> set[EventQueue]:
        """Whoever waits for an answer of the engine that has died."""
        if loss.engine is None:
            return set(self.readers.values())
        return {self.readers[name] for name in self._requests_at(loss.engine) if name in self.readers}
