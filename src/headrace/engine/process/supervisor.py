"""Restarts an engine: its process is checked, and a new one starts when it has died or hangs.

starting ─▶ ready ─▶ restarting ─▶ ready ...
              │          └────────▶ dead     after too many restarts in the window
              └────▶ asleep ─▶ ready         its process, with all of its memory, is gone until it is woken
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Literal

from headrace.config import EngineConfig
from headrace.engine.client import Client, Deliver
from headrace.engine.core import EngineStats
from headrace.engine.forks import end_in_forks
from headrace.engine.process.engine_process import HEARTBEAT_S, LOAD_CORE, EngineProcess, ProcessHealth
from headrace.engine.process.health_check import HealthCheck
from headrace.engine.process.wire import Ready
from headrace.engine.profiler import ProfileOptions
from headrace.engine.restart_policy import SUPERVISOR_RESTARTS, RestartCounter, RestartPolicy
from headrace.errors import AdapterError, ConfigError, EngineDeadError, HeadraceError
from headrace.startup import Report
from headrace.types import Request

Phase = Literal["starting", "ready", "restarting", "asleep", "dead"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """When an engine counts as hung, and how often it is restarted."""

    step_timeout_s: float = 120.0
    restarts: RestartPolicy = SUPERVISOR_RESTARTS
    check_s: float = 1.0  # between two health checks
    heartbeat_s: float = HEARTBEAT_S
    clock: Callable[[], float] = monotonic

    def __post_init__(self) -> None:
        if not self.step_timeout_s > 0:
            raise ConfigError(f"step_timeout_s must be above 0, got {self.step_timeout_s!r}")
        if self.restarts.max_starts < 0:
            raise ConfigError(f"max_engine_restarts must be at least 0, got {self.restarts.max_starts!r}")

    @classmethod
    def of(cls, *, step_timeout_s: float | None = None, max_restarts: int | None = None) -> Supervision:
        """Returns the rules with the user's settings. None: the default."""
        rules = cls()
        if step_timeout_s is not None:
            rules = replace(rules, step_timeout_s=step_timeout_s)
        if max_restarts is not None:
            rules = replace(rules, restarts=replace(rules.restarts, max_starts=max_restarts))
        return rules


def supervision(is_wanted: bool, *, step_timeout_s: float | None, max_restarts: int | None) -> Supervision | None:
    """The same, or None if no supervision is wanted; settings for it are refused then."""
    if is_wanted:
        return Supervision.of(step_timeout_s=step_timeout_s, max_restarts=max_restarts)
    if step_timeout_s is not None or max_restarts is not None:
        raise ConfigError("step_timeout_s and max_engine_restarts are for a supervised engine; add supervised=True")
    return None


class _Hung(EngineDeadError):
    pass


class EngineSupervisor:
    """An engine client (`engine/client.Client`) over the process that runs now. When a process has ended, `deliver` is
    called with no events: all requests submitted before are lost, and `failure` says why."""

    def __init__(
        self,
        deliver: Deliver,
        rules: Supervision,
        *,
        core: str = LOAD_CORE,
        report: Report = lambda stage: None,
        environment: Mapping[str, str] | None = None,
        name: str = "the engine",
    ) -> None:
        """`environment`: variables that its processes get beside those of this process. `name`: in the log."""
        self._deliver = deliver
        self._environment = environment
        self._name = name
        self._rules = rules
        self._core = core
        self._report = report
        self._config: EngineConfig | None = None
        self._phase: Phase = "starting"
        self._failure: BaseException | None = None
        self._num_restarts = 0
        self._starts = RestartCounter(rules.restarts, rules.clock)
        self._max_running: int | None = None
        self._adapters: dict[str, str] = {}  # that are loaded: the path of each by name
        self._closing = threading.Event()
        self._is_asleep = False
        self._sleep_lock = threading.Lock()  # one change between asleep and awake at a time
        self._wake = threading.Event()  # the supervisor's thread has something to check
        self._swap = threading.Lock()
        self._process = self._new_process()
        self._thread: threading.Thread | None = None
        end_in_forks(self)

    @property
    def phase(self) -> Phase:
        return "asleep" if self._is_asleep and self._phase != "dead" else self._phase

    @property
    def num_restarts(self) -> int:
        return self._num_restarts

    @property
    def failure(self) -> BaseException | None:
        """Why there is no engine now: it is restarting, asleep or dead."""
        return _asleep() if self.phase == "asleep" else self._failure

    @property
    def stats(self) -> EngineStats:
        """The counters of the process that runs now. A new one counts from zero."""
        return self._process.stats

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def health(self) -> ProcessHealth:
        return self._process.health

    def start(self, config: EngineConfig) -> None:
        self._config = config
        self._process.start(config)

    def wait_until_ready(self) -> Ready:
        """The first start. An error is raised to the caller; there is no second attempt."""
        ready = self._process.wait_until_ready()
        assert self._config is not None
        self._adapters = self._config.adapter_paths
        if ready.settings.adapters is not None:
            # Later ones load them one by one: one that cannot be read any more must not stop the others.
            max_loras = ready.settings.adapters.max_loras
            self._config = replace(self._config, enable_lora=True, lora_modules=None, max_loras=max_loras)
        self._phase = "ready"
        self._start_supervising()
        return ready

    def _start_supervising(self) -> None:
        self._thread = threading.Thread(target=self._supervise, name="headrace-supervisor", daemon=True)
        self._thread.start()

    def sleep(self) -> None:
        """End the process, which frees all of its memory. Requests that it runs are lost. Returns when it has ended."""
        with self._sleep_lock:
            if self._is_asleep:
                return
            self._refuse_unless_ready()
            self._is_asleep = True
            self._wake.set()
            if self._thread is not None:
                self._thread.join()
            self._process.close()
            self._deliver([])

    def wake_up(self) -> None:
        """Start a process again. Returns when it accepts requests; raises what the start raises, and stays asleep."""
        with self._sleep_lock:
            if not self._is_asleep:
                return
            self._start_again()
            self._is_asleep = False
            self._start_supervising()

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
            pass  # the request ended with its engine

    def limit_running(self, num_seqs: int | None) -> None:
        self._max_running = num_seqs
        try:
            self._process.limit_running(num_seqs)
        except EngineDeadError:
            pass  # the next process gets the limit when it starts

    def forget_prefixes(self) -> None:
        try:
            self._process.forget_prefixes()
        except EngineDeadError:
            pass  # the next process starts with an empty cache

    def start_profile(self, options: ProfileOptions) -> Future[dict[str, Any]]:
        self._refuse_unless_ready()
        return self._process.start_profile(options)

    def stop_profile(self) -> Future[dict[str, Any]]:
        self._refuse_unless_ready()
        return self._process.stop_profile()

    def load_adapter(self, name: str, path: str, *, replaces: bool = False) -> Future[None]:
        self._refuse_unless_ready()
        loading = self._process.load_adapter(name, path, replaces=replaces)
        loading.add_done_callback(lambda done: self._remember_adapter(done, name, path))
        return loading

    def unload_adapter(self, name: str) -> Future[None]:
        self._refuse_unless_ready()
        unloading = self._process.unload_adapter(name)
        unloading.add_done_callback(lambda done: self._remember_adapter(done, name, None))
        return unloading

    def _remember_adapter(self, done: Future[None], name: str, path: str | None) -> None:
        """The next process gets what this one has loaded."""
        if done.exception() is None:
            self._adapters.pop(name, None)
            self._adapters |= {} if path is None else {name: path}

    def close(self) -> None:
        with self._swap:
            self._closing.set()
            process = self._process
        self._wake.set()
        process.close()
        if self._thread is not None:
            self._thread.join()
        self._failure, self._phase = self._failure or EngineDeadError("it was closed"), "dead"

    def end_in_fork(self, failure: EngineDeadError) -> None:
        self._swap = threading.Lock()  # the supervisor's thread may have held the other one
        self._failure, self._phase = failure, "dead"

    def _refuse_unless_ready(self) -> None:
        phase = self.phase
        if phase == "ready":
            return
        if phase == "asleep":
            raise _asleep()
        if phase == "dead":
            raise EngineDeadError(f"the engine has stopped for good: {self._failure}")
        raise EngineDeadError(f"the engine is restarting: {self._failure}", code="engine_restarting")

    def _new_process(self) -> EngineProcess:
        rules = self._rules
        return EngineProcess(
            self._deliver,
            self._wake.set,
            core=self._core,
            heartbeat_s=rules.heartbeat_s,
            report=self._report,
            environment=self._environment,
        )

    # ---- on the supervisor's thread

    def _supervise(self) -> None:
        while self._phase == "ready":
            failure = self._wait_for_failure()
            if failure is None:
                return
            _log.error("%s has stopped: %s", self._name, failure)
            self._failure, self._phase = failure, "restarting"
            self._deliver([])
            # The next process needs the memory that this one holds.
            self._process.kill(str(failure), dump_stacks=isinstance(failure, _Hung))
            self._restart()

    def _wait_for_failure(self) -> BaseException | None:
        """Returns the failure; None if the supervisor is closing, or the engine is put to sleep."""
        check = HealthCheck(self._rules.step_timeout_s, self._rules.clock)
        while not (self._closing.is_set() or self._is_asleep):
            if self._process.failure is not None:
                return self._process.failure
            problem = check.problem(self._process.health)
            if problem is not None:
                return _Hung(problem)
            self._wake.wait(self._rules.check_s)
            self._wake.clear()
        return None

    def _restart(self) -> None:
        """Try until an engine runs or the limit of restarts is reached."""
        while not self._closing.is_set():
            delay_s = self._starts.next_delay_s()
            if delay_s is None:
                _log.error("%s was restarted too often and stays stopped: %s", self._name, self._failure)
                self._phase = "dead"
                return
            if self._closing.wait(delay_s):
                return
            self._num_restarts += 1
            try:
                self._start_again()
            except HeadraceError as error:
                if self._closing.is_set():
                    return
                _log.error("%s could not be restarted: %s", self._name, error)
                self._failure = error
            else:
                _log.warning("%s is back, after restart %d", self._name, self._num_restarts)
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
        for name, path in self._adapters.items():
            try:
                self._process.load_adapter(name, path).result()
            except AdapterError as error:
                _log.error("%s has lost the adapter %s: %s", self._name, name, error)
        self._failure, self._phase = None, "ready"


def _asleep() -> EngineDeadError:
    return EngineDeadError("the engine is asleep; POST /wake_up wakes it", code="asleep")


def phase_of(client: Client) -> Phase:
    """`ready` (accepts requests), `restarting` or `asleep` (will accept them again) or `dead` (will not)."""
    if isinstance(client, EngineSupervisor):
        return client.phase
    return "ready" if client.failure is None else "dead"
