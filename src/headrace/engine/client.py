"""The front's way to an engine: requests go in from any thread, events come out through one callback.

The core runs on a thread of its own; the front never waits for a step, and the core never for a tokenizer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from headrace.engine.core import EngineCore, EngineStats
from headrace.engine.grammars import Grammar
from headrace.errors import EngineDeadError, RequestError
from headrace.types import Request, SequenceEvent, TokenIds

Deliver = Callable[[list[SequenceEvent]], None]
Command = Callable[[], list[SequenceEvent]]

_NO_TOKENS: TokenIds = np.empty(0, np.int32)


class EngineClient:
    """Owns the engine's thread. `deliver` is called on it, with the news of each step; it must not block."""

    def __init__(self, core: EngineCore, deliver: Deliver) -> None:
        self._core = core
        self._deliver = deliver
        self._inbox: deque[Command] = deque()
        self._has_news = threading.Condition()
        self._is_closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> EngineStats:
        return self._core.stats

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    def submit(self, request: Request) -> None:
        """Queue a request. What could never run is refused here and now, a grammar compiled."""
        self._core.check(request)
        grammar = self._core.grammar_of(request)
        self._send(lambda: self._add(request, grammar))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request or one of its sequences; its last event says `abort`."""
        self._send(lambda: self._core.abort(request_id, index))

    def limit_running(self, num_seqs: int | None) -> None:
        """Run at most so many sequences at once; None: as many as the engine can."""
        self._send(lambda: self._core.limit_running(num_seqs))

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, but for what running sequences hold."""
        self._send(self._core.forget_prefixes)

    def close(self) -> None:
        """Stop after the step in flight. What is unfinished stays so."""
        with self._has_news:
            self._is_closing = True
            self._has_news.notify()
        self._thread.join()

    def _send(self, command: Command) -> None:
        if self._failure is not None:
            raise EngineDeadError(f"the engine has stopped: {self._failure}") from self._failure
        with self._has_news:
            self._inbox.append(command)
            self._has_news.notify()

    def _add(self, request: Request, grammar: Grammar | None) -> list[SequenceEvent]:
        try:
            self._core.add(request, grammar)
        except RequestError as error:
            return [SequenceEvent(request.request_id, 0, _NO_TOKENS, "abort", error=str(error))]
        return []

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                events = self._take_inbox()
                events += self._core.step()
                if events:
                    self._deliver(events)
        except BaseException as error:  # noqa: BLE001  the engine's edge: those who wait must hear of it
            self._failure = error
            self._deliver([])
        finally:
            self._shut_down()

    def _wait_for_work(self) -> bool:
        with self._has_news:
            while not (self._inbox or self._core.has_work or self._is_closing):
                self._has_news.wait()
            return not self._is_closing

    def _take_inbox(self) -> list[SequenceEvent]:
        events: list[SequenceEvent] = []
        while self._inbox:
            events += self._inbox.popleft()()
        return events

    def _shut_down(self) -> None:
        try:
            self._core.close()
        except Exception as error:  # noqa: BLE001  already stopping; the first failure counts
            self._failure = self._failure or error
