"""The engine's loop: take commands from the inbox, run a step, deliver its events. On the thread that calls `run`."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic
from typing import Any, Protocol, runtime_checkable

from headrace.engine.core import NO_TOKENS, EngineCore, EngineStats
from headrace.engine.grammars import Grammar
from headrace.engine.profiler import EngineProfiler, ProfileOptions
from headrace.errors import AdapterError, EngineDeadError, HeadraceError, ProfilerError, RequestError
from headrace.types import Request, SequenceEvent

AfterStep = Callable[[list[SequenceEvent]], None]
Command = Callable[[], list[SequenceEvent]]

MAX_DELAYS = 8  # times the batching delay: the longest wait of a first request
MAX_DELAY_SHARE = 0.1  # of the time that the prompts take: the largest part to spend on waiting for more of them
MIN_LEARNED_TOKENS = 256  # prompt tokens of a step; fewer say nothing about the time of a token

_log = logging.getLogger(__name__)


@runtime_checkable
class ReportsFailures(Protocol):
    """A runner that may fail while it runs no step: processes of other ranks may end at any time."""

    def on_failure(self, call: Callable[[EngineDeadError], None]) -> None: ...


class EngineLoop:
    """Owns the core while it runs; other threads put commands into its inbox. `after_step` is called once per iteration
    with its events, perhaps none, and must not block. `on_failure` is called at most once, before the core closes.

    Batching delay: a request that arrives at an idle engine waits for others, as long as each arrives within
    `batching_delay_s` of the last, their prompts fit in a step, and the wait is short compared to their prefill.
    Started alone, it would get its first token early, but its second only after all of their prompts. It does not wait
    if the request before it arrived and finished alone: the client probably sends one request after the other.

    `prefill_token_s` is a first estimate of the time that a prompt token takes; `condition` guards the inbox."""

    def __init__(
        self,
        core: EngineCore,
        after_step: AfterStep,
        on_failure: Callable[[BaseException], None],
        *,
        batching_delay_s: float = 0.0,
        prefill_token_s: float | None = None,
        condition: threading.Condition | None = None,
        profiler: EngineProfiler | None = None,
    ) -> None:
        self._core = core
        self._profiler = profiler
        self._unanswered: set[Future[Any]] = set()  # of commands that return something
        self._after_step = after_step
        self._on_failure = on_failure
        self._batching_delay_s = batching_delay_s
        self._inbox: deque[Command] = deque()
        self._num_new_tokens = 0  # of prompts in the inbox
        self._num_together = 0  # requests since the engine was last idle
        self._first_step: tuple[float, int] | None = None  # since then, until it is done: start time, number of tokens
        self._prefill_token_s = prefill_token_s
        self._condition = condition or threading.Condition()
        self._is_stopping = False
        self._failure: BaseException | None = None

    @property
    def stats(self) -> EngineStats:
        return self._core.stats

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @property
    def prefill_token_s(self) -> float | None:
        """Seconds per prompt token, learned from the last first step after the engine was idle."""
        return self._prefill_token_s

    @property
    def has_work(self) -> bool:
        return bool(self._inbox) or self._core.has_work

    @property
    def num_finished_steps(self) -> int:
        return self._core.num_finished_steps

    def submit(self, request: Request) -> None:
        """Queue a request. Refuses at once what could never run, and compiles its grammar."""
        self._core.check(request)
        self.accept(request)

    def accept(self, request: Request) -> None:
        """Queue a request that the front has checked (`engine/checks.py`), in another process perhaps."""
        grammar = self._core.grammar_of(request)
        self._send(lambda: self._add(request, grammar), len(request.prompt_token_ids))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request or one of its sequences; its last event says `abort`."""
        self._send(lambda: self._core.abort(request_id, index))

    def limit_running(self, num_seqs: int | None) -> None:
        """Run at most `num_seqs` sequences at once; None: as many as the engine can."""
        self._send(lambda: self._core.limit_running(num_seqs))

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, except for blocks that running sequences hold."""
        self._send(self._core.forget_prefixes)

    def start_profile(self, options: ProfileOptions) -> Future[dict[str, Any]]:
        """Open a window of the profiler (`engine/profiler.py`), between two steps."""
        return self._ask_profiler(lambda profiler: _done(profiler.start(options)))

    def stop_profile(self) -> Future[dict[str, Any]]:
        """Close it; the result is its record, once its files are written."""
        return self._ask_profiler(lambda profiler: profiler.stop())

    def load_adapter(self, name: str, path: str, *, replaces: bool = False) -> Future[None]:
        """Load a LoRA adapter. Its files are read on a thread of their own, while steps go on."""
        answer: Future[None] = Future()
        self._unanswered.add(answer)

        def read() -> None:
            try:
                adapter = self._core.read_adapter(path)
                self._send(lambda: self._try(answer, lambda: self._core.load_adapter(name, adapter, replaces=replaces)))
            except HeadraceError as error:
                self._answer(answer, _failed(error))
            except Exception as error:  # noqa: BLE001  a bad file must not end the engine
                _log.exception("an adapter could not be read")
                self._answer(answer, _failed(AdapterError(f"{path} cannot be read as an adapter: {error!r}")))

        threading.Thread(target=read, name="headrace-adapter", daemon=True).start()
        return answer

    def unload_adapter(self, name: str) -> Future[None]:
        """Unload an adapter: later requests are refused, those that run with it go on."""
        answer: Future[None] = Future()
        self._unanswered.add(answer)
        self._send(lambda: self._try(answer, lambda: self._core.unload_adapter(name)))
        return answer

    def _try(self, answer: Future[None], action: Callable[[], None]) -> list[SequenceEvent]:
        try:
            action()
        except AdapterError as error:
            self._answer(answer, _failed(error))
        else:
            self._answer(answer, _done(None))
        return []

    def refuse(self, request_id: str, reason: str) -> None:
        """Deliver an error event for a request that could not be submitted."""
        self._send(lambda: [_refusal(request_id, reason)])

    def stop(self) -> None:
        """End `run` after the step in flight. Unfinished requests stay unfinished."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify()

    def fail(self, error: EngineDeadError) -> None:
        """End `run` with this error, also while it waits for work. From any thread."""

        def command() -> list[SequenceEvent]:
            raise error

        try:
            self._send(command)
        except EngineDeadError:
            pass  # it has failed before

    def run(self) -> None:
        """Run until stopped or failed; `failure` says which."""
        if isinstance(self._core.runner, ReportsFailures):
            self._core.runner.on_failure(self.fail)
        try:
            while self._wait_for_work():
                events = self._take_inbox()
                events += self._core.step()
                if self._first_step is not None and events:
                    self._learn(*self._first_step)
                self._after_step(events)
        except BaseException as error:  # noqa: BLE001  the engine's boundary: waiting callers must get the error
            self._refuse_from_now_on(error)
            self._on_failure(error)
        finally:
            self._shut_down()

    def _ask_profiler(self, ask: Callable[[EngineProfiler], Future[dict[str, Any]]]) -> Future[dict[str, Any]]:
        answer: Future[dict[str, Any]] = Future()

        def command() -> list[SequenceEvent]:
            try:
                if self._profiler is None:
                    raise ProfilerError("this engine has no profiler")
                ask(self._profiler).add_done_callback(lambda done: self._answer(answer, done))
            except ProfilerError as error:
                self._answer(answer, _failed(error))
            except Exception as error:  # noqa: BLE001  a failure of the profiler must not end the engine
                _log.exception("the profiler has failed")
                self._answer(answer, _failed(ProfilerError(f"the profiler has failed: {error!r}")))
            return []

        self._unanswered.add(answer)
        try:
            self._send(command)
        except EngineDeadError:
            self._unanswered.discard(answer)
            raise
        return answer

    def _answer(self, answer: Future[Any], done: Future[Any]) -> None:
        self._unanswered.discard(answer)
        if answer.done():
            return
        error = done.exception()
        if error is None:
            answer.set_result(done.result())
        else:
            answer.set_exception(error)

    def _send(self, command: Command, num_tokens: int = 0) -> None:
        with self._condition:
            if self._failure is not None:
                raise EngineDeadError(f"the engine has stopped: {self._failure}") from self._failure
            self._inbox.append(command)
            self._num_new_tokens += num_tokens
            self._condition.notify()

    def _refuse_from_now_on(self, failure: BaseException) -> None:
        """Let `_send` raise this failure, unless there was an earlier one."""
        with self._condition:
            self._failure = self._failure or failure

    def _add(self, request: Request, grammar: Grammar | None) -> list[SequenceEvent]:
        self._num_together += 1
        try:
            self._core.add(request, grammar)
        except RequestError as error:
            return [_refusal(request.request_id, str(error))]
        except Exception as error:  # noqa: BLE001  an error of one request must not end the others
            _log.exception("a request could not be added")
            return [_refusal(request.request_id, could_not_take(error))]
        return []

    def _wait_for_work(self) -> bool:
        with self._condition:
            if not (self.has_work or self._is_stopping):
                while not (self._inbox or self._is_stopping):
                    self._condition.wait()
                if self._num_together != 1:
                    self._wait_for_others()
                self._num_together = 0
                self._first_step = monotonic(), min(self._num_new_tokens, self._core.max_step_tokens)
            return not self._is_stopping

    def _wait_for_others(self) -> None:
        num_seen, started = 0, monotonic()
        while num_seen < len(self._inbox) and not self._is_stopping:
            num_seen, num_tokens = len(self._inbox), self._num_new_tokens
            left = started + self._max_wait_s(num_tokens) - monotonic()
            if left <= 0.0 or num_tokens >= self._core.max_step_tokens:
                return
            self._condition.wait(min(left, self._batching_delay_s))

    def _max_wait_s(self, num_tokens: int) -> float:
        """The longest wait in seconds for prompts of `num_tokens`."""
        max_s = MAX_DELAYS * self._batching_delay_s
        if self._prefill_token_s is None:
            return max_s
        return min(max_s, MAX_DELAY_SHARE * self._prefill_token_s * num_tokens)

    def _learn(self, started: float, num_tokens: int) -> None:
        self._first_step = None
        if num_tokens >= MIN_LEARNED_TOKENS:
            self._prefill_token_s = (monotonic() - started) / num_tokens

    def _take_inbox(self) -> list[SequenceEvent]:
        events: list[SequenceEvent] = []
        self._num_new_tokens = 0
        while self._inbox:
            events += self._inbox.popleft()()
        return events

    def _shut_down(self) -> None:
        if self._profiler is not None:
            self._profiler.close()
        for answer in list(self._unanswered):
            self._answer(answer, _failed(EngineDeadError("the engine has stopped")))
        try:
            self._core.close()
        except Exception as error:  # noqa: BLE001  already stopping; the first failure counts
            self._failure = self._failure or error


def _refusal(request_id: str, reason: str) -> SequenceEvent:
    return SequenceEvent(request_id, 0, NO_TOKENS, "abort", error=reason)


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def _failed(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def could_not_take(error: Exception) -> str:
    """A message for the client. Names only the class of the internal error, since the client may not be trusted."""
    return f"the engine could not take the request ({type(error).__name__}); its log says more"
