"""The turns of an engine: take in what was asked, do a step, hand over the news. On whatever thread calls `run`."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

import numpy as np

from headrace.engine.core import EngineCore, EngineStats
from headrace.engine.grammars import Grammar
from headrace.errors import EngineDeadError, RequestError
from headrace.types import Request, SequenceEvent, TokenIds

AfterTurn = Callable[[list[SequenceEvent]], None]
Command = Callable[[], list[SequenceEvent]]

MAX_GATHERS = 8  # times that a first request waits for others
GATHER_SHARE = 0.1  # of the time that the prompts take, that may be spent on waiting for more of them
LEAST_LEARNED = 256  # tokens of prompts, from which their time says something about others

_NO_TOKENS: TokenIds = np.empty(0, np.int32)
_log = logging.getLogger(__name__)


class EngineLoop:
    """Owns the core while it runs; others leave commands in its inbox. `after_turn` is called once a turn, must not
    block, and gets the turn's events, of which there may be none; `on_failure` at most once, before the core closes.

    A request that finds the engine idle waits for others, as long as each comes within `gather_s` of the last, their
    prompts fit in a step and the wait is short beside what these take: started alone, it would have its first token
    early and its second after all of their prompts. If the one before it came and went alone, it does not wait:
    somebody may be asking one thing after the other."""

    def __init__(
        self,
        core: EngineCore,
        after_turn: AfterTurn,
        on_failure: Callable[[BaseException], None],
        *,
        gather_s: float = 0.0,
    ) -> None:
        self._core = core
        self._after_turn = after_turn
        self._on_failure = on_failure
        self._gather_s = gather_s
        self._inbox: deque[Command] = deque()
        self._num_new_tokens = 0  # of prompts in the inbox
        self._num_together = 0  # requests since the engine was idle last
        self._first_step: tuple[float, int] | None = None  # since then, until it is done: when, and of how many tokens
        self._token_s: float | None = None  # of a prompt's token, in the last first step
        self._has_events = threading.Condition()
        self._is_stopping = False
        self._failure: BaseException | None = None

    @property
    def stats(self) -> EngineStats:
        return self._core.stats

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @property
    def has_work(self) -> bool:
        return bool(self._inbox) or self._core.has_work

    @property
    def num_finished_steps(self) -> int:
        return self._core.num_finished_steps

    def submit(self, request: Request) -> None:
        """Queue a request. What could never run is refused here and now, a grammar compiled."""
        self._core.check(request)
        grammar = self._core.grammar_of(request)
        self._send(lambda: self._add(request, grammar), len(request.prompt_token_ids))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request or one of its sequences; its last event says `abort`."""
        self._send(lambda: self._core.abort(request_id, index))

    def limit_running(self, num_seqs: int | None) -> None:
        """Run at most so many sequences at once; None: as many as the engine can."""
        self._send(lambda: self._core.limit_running(num_seqs))

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, but for what running sequences hold."""
        self._send(self._core.forget_prefixes)

    def refuse(self, request_id: str, reason: str) -> None:
        """Answer a request that could not even be submitted."""
        self._send(lambda: [_refusal(request_id, reason)])

    def stop(self) -> None:
        """End `run` after the step in flight. What is unfinished stays so."""
        with self._has_events:
            self._is_stopping = True
            self._has_events.notify()

    def run(self) -> None:
        """Turn until stopped or broken; `failure` tells which."""
        try:
            while self._wait_for_work():
                events = self._take_inbox()
                events += self._core.step()
                if self._first_step is not None and events:
                    self._learn(*self._first_step)
                self._after_turn(events)
        except BaseException as error:  # noqa: BLE001  the engine's edge: those who wait must hear of it
            self._failure = error
            self._on_failure(error)
        finally:
            self._shut_down()

    def _send(self, command: Command, num_tokens: int = 0) -> None:
        if self._failure is not None:
            raise EngineDeadError(f"the engine has stopped: {self._failure}") from self._failure
        with self._has_events:
            self._inbox.append(command)
            self._num_new_tokens += num_tokens
            self._has_events.notify()

    def _add(self, request: Request, grammar: Grammar | None) -> list[SequenceEvent]:
        self._num_together += 1
        try:
            self._core.add(request, grammar)
        except RequestError as error:
            return [_refusal(request.request_id, str(error))]
        except Exception as error:  # noqa: BLE001  one request's fault must not become everybody's
            _log.exception("a request could not be added")
            return [_refusal(request.request_id, could_not_take(error))]
        return []

    def _wait_for_work(self) -> bool:
        with self._has_events:
            if not (self.has_work or self._is_stopping):
                while not (self._inbox or self._is_stopping):
                    self._has_events.wait()
                if self._num_together != 1:
                    self._wait_for_others()
                self._num_together = 0
                self._first_step = monotonic(), min(self._num_new_tokens, self._core.max_step_tokens)
            return not self._is_stopping

    def _wait_for_others(self) -> None:
        num_seen, started = 0, monotonic()
        while num_seen < len(self._inbox) and not self._is_stopping:
            num_seen, num_tokens = len(self._inbox), self._num_new_tokens
            left = started + self._worth_waiting(num_tokens) - monotonic()
            if left <= 0.0 or num_tokens >= self._core.max_step_tokens:
                return
            self._has_events.wait(min(left, self._gather_s))

    def _worth_waiting(self, num_tokens: int) -> float:
        """Seconds, for prompts of so many tokens."""
        most = MAX_GATHERS * self._gather_s
        return most if self._token_s is None else min(most, GATHER_SHARE * self._token_s * num_tokens)

    def _learn(self, started: float, num_tokens: int) -> None:
        self._first_step = None
        if num_tokens >= LEAST_LEARNED:
            self._token_s = (monotonic() - started) / num_tokens

    def _take_inbox(self) -> list[SequenceEvent]:
        events: list[SequenceEvent] = []
        self._num_new_tokens = 0
        while self._inbox:
            events += self._inbox.popleft()()
        return events

    def _shut_down(self) -> None:
        try:
            self._core.close()
        except Exception as error:  # noqa: BLE001  already stopping; the first failure counts
            self._failure = self._failure or error


def _refusal(request_id: str, reason: str) -> SequenceEvent:
    return SequenceEvent(request_id, 0, _NO_TOKENS, "abort", error=reason)


def could_not_take(error: Exception) -> str:
    """Goes to whoever asked, perhaps a stranger: of what went wrong inside only its name."""
    return f"the engine could not take the request ({type(error).__name__}); its log says more"
