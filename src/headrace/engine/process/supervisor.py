"""An engine that comes back: its process is watched, and another is started when it has died or hangs.

starting ─▶ ready ─▶ restarting ─▶ ready ...
                         └────────▶ dead     after too many restarts in a short time
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, Literal

from headrace.config import EngineConfig
from headrace.engine.client import Deliver
from headrace.engine.core import EngineStats
from headrace.engine.process.engine_process import LOAD_CORE, PULSE_S, EngineProcess, VitalSigns
from headrace.engine.process.watch import Watch
from headrace.engine.process.wire import Ready
from headrace.errors import ConfigError, EngineDeadError, HeadraceError
from headrace.types import Request

Phase = Literal["starting", "ready", "restarting", "dead"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """When an engine counts as hung, and how often it is started again."""

    step_timeout_s: float = 120.0
    max_restarts: int = 5  # within `window_s`
    window_s: float = 600.0
    first_delay_s: float = 1.0  # before a restart; the next ones wait twice as long each
    look_s: float = 1.0  # between two looks at the process
    pulse_s: float = PULSE_S
    clock: Callable[[], float] = monotonic

    def __post_init__(self) -> None:
        if not self.step_timeout_s > 0:
            raise ConfigError(f"step_timeout_s must be above 0, got {self.step_timeout_s!r}")
        if self.max_restarts < 0:
            raise ConfigError(f"max_engine_restarts must be at least 0, got {self.max_restarts!r}")


def supervision(is_wanted: bool, *, step_timeout_s: float | None, max_restarts: int | None) -> Supervision | None:
    """The rules that a user set, the others as they are; None: no supervision."""
    given = {"step_timeout_s": step_timeout_s, "max_restarts": max_restarts}
    changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if changed and not is_wanted:
        raise ConfigError("step_timeout_s and max_engine_restarts are for a supervised engine; add supervised=True")
    return Supervision(**changed) if is_wanted else None


class Backoff:
    """How long to wait before each restart, and when to give up."""

    def __init__(self, rules: Supervision) -> None:
        self._rules = rules
        self._restarts: deque[float] = deque()  # their times, within the window

    def next_delay_s(self) -> float | None:
        """None: there were too many."""
        now = self._rules.clock()
        while self._restarts and self._restarts[0] <= now - self._rules.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self._rules.max_restarts:
            return None
        self._restarts.append(now)
        return self._rules.first_delay_s * 2.0 ** (len(self._restarts) - 1)


class _Hung(EngineDeadError):
    pass


class EngineSupervisor:
    """The calls of an engine's client, on whichever process runs now. `deliver` is called with no events when one has
    ended: all that was submitted before is lost then, and `failure` says why."""

    def __init__(
        self,
        deliver: Deliver,
        rules: Supervision,
        *,
        core: str = LOAD_CORE,
        report: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self._deliver = deliver
        self._rules = rules
        self._core = core
        self._report = report
        self._config: EngineConfig | None = None
        self._phase: Phase = "starting"
        self._failure: BaseException | None = None
        self._num_restarts = 0
        self._backoff = Backoff(rules)
        self._max_running: int | None = None
        self._closing = threading.Event()
        self._look = threading.Event()
        self._swap = threading.Lock()
        self._process = self._new_process()
        self._thread: threading.Thread | None = None

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def num_restarts(self) -> int:
        return self._num_restarts

    @property
    def failure(self) -> BaseException | None:
        """Why there is no engine at the moment, or for good."""
        return self._failure

    @property
    def stats(self) -> EngineStats:
        """Of the process that runs; a new one counts from zero."""
        return self._process.stats

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def signs(self) -> VitalSigns:
        return self._process.signs

    def start(self, config: EngineConfig) -> None:
        self._config = config
        self._process.start(config)

    def wait_until_ready(self) -> Ready:
        """The first start. If it fails, that is the caller's to see: nothing is tried again."""
        ready = self._process.wait_until_ready()
        self._phase = "ready"
        self._thread = threading.Thread(target=self._supervise, name="headrace-supervisor", daemon=True)
        self._thread.start()
        return ready

    def submit(self, request: Request) -> None:
        self._refuse_unless_ready()
        try:
            self._process.submit(request)
        except EngineDeadError as error:
            raise EngineDeadError(str(error), code="engine_restarting") from error

    def abort(self, request_id: str, index: int | None = None) -> None:
        try:
            self._process.abort(request_id, index)
        except EngineDeadError:
            pass  # it ended with its engine

    def limit_running(self, num_seqs: int | None) -> None:
        self._max_running = num_seqs
        try:
            self._process.limit_running(num_seqs)
        except EngineDeadError:
            pass  # the next one will be told

    def forget_prefixes(self) -> None:
        try:
            self._process.forget_prefixes()
        except EngineDeadError:
            pass  # they are forgotten

    def close(self) -> None:
        with self._swap:
            self._closing.set()
            process = self._process
        self._look.set()
        process.close()
        if self._thread is not None:
            self._thread.join()

    def _refuse_unless_ready(self) -> None:
        if self._phase == "ready":
            return
        if self._phase == "dead":
            raise EngineDeadError(f"the engine has stopped for good: {self._failure}")
        raise EngineDeadError(f"the engine is restarting: {self._failure}", code="engine_restarting")

    def _new_process(self) -> EngineProcess:
        rules = self._rules
        return EngineProcess(self._deliver, self._look.set, core=self._core, pulse_s=rules.pulse_s, report=self._report)

    # ---- on its own thread

    def _supervise(self) -> None:
        while self._phase == "ready":
            failure = self._wait_for_failure()
            if failure is None:
                return
            _log.error("the engine has stopped: %s", failure)
            self._failure, self._phase = failure, "restarting"
            self._deliver([])
            self._process.kill(
                str(failure), asking_where=isinstance(failure, _Hung)
            )  # the next one needs what it holds
            self._restart()

    def _wait_for_failure(self) -> BaseException | None:
        """None: the supervisor is closing."""
        watch = Watch(self._rules.step_timeout_s, self._rules.clock)
        while not self._closing.is_set():
            if self._process.failure is not None:
                return self._process.failure
            complaint = watch.complaint(self._process.signs)
            if complaint is not None:
                return _Hung(complaint)
            self._look.wait(self._rules.look_s)
            self._look.clear()
        return None

    def _restart(self) -> None:
        """Try until there is an engine again, or there were too many."""
        while not self._closing.is_set():
            delay_s = self._backoff.next_delay_s()
            if delay_s is None:
                _log.error("the engine was restarted too often and stays dead: %s", self._failure)
                self._phase = "dead"
                return
            if self._closing.wait(delay_s):
                return
            self._num_restarts += 1
            try:
                self._start_again()
            except HeadraceError as error:
                _log.error("the engine could not be restarted: %s", error)
                self._failure = error
            else:
                return

    def _start_again(self) -> None:
        assert self._config is not None
        with self._swap:
            if self._closing.is_set():
                raise EngineDeadError("the engine is closed")
            self._process = self._new_process()
        self._process.start(self._config)
        self._process.wait_until_ready()
        self._process.limit_running(self._max_running)
        self._failure, self._phase = None, "ready"
