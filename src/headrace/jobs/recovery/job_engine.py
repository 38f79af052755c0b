"""The engine of a job, or of one of its workers, and its replacement after it has died."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any

from headrace import garbage
from headrace.config import EngineConfig
from headrace.engine.client import Deliver
from headrace.engine.core import EngineStats
from headrace.engine.joined_stats import joined_stats
from headrace.engine.offline_order import target_concurrency_of
from headrace.engine.process.engine_process import EngineProcess
from headrace.engine.profiler import ProfileOptions
from headrace.engine.settings import Settings
from headrace.engine.shared_client import SharedClient
from headrace.engine.start import Engine
from headrace.errors import EngineDeadError
from headrace.jobs.planning.workload import WorkLeft
from headrace.sched import SchedulerStats
from headrace.types import Request, SequenceEvent

Start = Callable[[EngineConfig, Deliver], Engine]

SPARE_SEQUENCES = 8  # in flight beyond twice what runs, so that the queue of a small engine is never empty


@dataclass(frozen=True, slots=True)
class DeadEngine:
    """What is known of an engine after it was released."""

    failure: BaseException
    settings: Settings
    had_own_process: bool


class JobEngine:
    """Owned by the job's main loop. At most one engine is alive at a time. A job with several workers has several of
    these (`jobs/workers`).

    No other object may keep a reference to `engine` or its client across a restart: the memory of a dead engine must be
    free before the next one loads. Events that a closed engine still sends are dropped."""

    def __init__(
        self,
        start: Start,
        deliver: Deliver,
        config: EngineConfig,
        *,
        number: int = 0,
        has_own_process: bool = False,
        waits: bool = True,
    ) -> None:
        """`has_own_process`: its engines run in processes, so that a start can be abandoned. Without `waits`, the first
        start only begins, and `engine` is missing until it has ended or `expect` was called."""
        self.number = number
        self._start = start
        self._deliver = deliver
        self._has_own_process = has_own_process
        self._live: Engine | None = None  # to be closed
        self._gate = _Gate(deliver)
        self._stats_before: EngineStats | None = None  # of the engines that have died
        self._starting: Future[Engine] | None = None
        self._death: BaseException | None = None  # noticed before its client has
        self.num_restarts = 0
        self._has_run = False
        if waits:
            self.start(config)
        else:
            self.begin_start(config)

    def start(self, config: EngineConfig) -> None:
        """Close the present engine, if there is one, and load the next one."""
        self.close()
        self._use(self._load(config))

    def _load(self, config: EngineConfig) -> Engine:
        self._gate = _Gate(self._deliver)
        return self._start(config, self._gate.deliver)

    def _use(self, engine: Engine) -> None:
        self.engine = self._live = engine
        self._has_run = True
        self._death = None
        self.max_sequences = _max_sequences(engine)

    def begin_start(self, config: EngineConfig) -> None:
        """Load the next engine on a thread of its own. When it has started, or failed to, `deliver` is called without
        events, and `finish_start` may be called."""
        self.close()
        self._starting = starting = Future[Engine]()

        def load() -> None:
            try:
                starting.set_result(self._load(config))
            except BaseException as error:  # noqa: BLE001  an engine may fail to start in any way
                starting.set_exception(error)
            self._deliver([])

        threading.Thread(target=load, name=f"headrace-start-{self.number}", daemon=True).start()

    @property
    def starting(self) -> Future[Engine] | None:
        """The start that `finish_start` ends."""
        return self._starting

    def expect(self, engine: Engine) -> None:
        """Take what the job needs to know about its engine from that of another worker, until its own has started."""
        waiting = EngineDeadError("it has not started yet", code="engine_restarting")
        self.engine = replace(engine, client=DeadClient(waiting), model=None)
        self.max_sequences = 2 * engine.settings.max_num_seqs + SPARE_SEQUENCES

    @property
    def is_starting(self) -> bool:
        return self._starting is not None

    @property
    def has_started(self) -> bool:
        """Whether `finish_start` will not wait."""
        return self._starting is not None and self._starting.done()

    def finish_start(self) -> None:
        """Use the engine that was started. Raises what its start has raised."""
        assert self._starting is not None
        starting, self._starting = self._starting, None
        engine = starting.result()
        self.num_restarts += self._has_run
        self._use(engine)

    @property
    def death(self) -> BaseException | None:
        """Why the engine has died. None: it runs, or was released."""
        if self._live is None:
            return None
        return self._death or self._live.client.failure

    @property
    def is_running(self) -> bool:
        return self._live is not None and self.death is None

    @property
    def settings(self) -> Settings:
        return self.engine.settings

    def submit(self, request: Request) -> None:
        """Raises a RequestError for a request that could never run, and an EngineDeadError if the engine has died."""
        try:
            self.engine.client.submit(request)
        except EngineDeadError as error:
            self._death = error.with_traceback(None)  # its frames would keep the engine in memory
            raise

    @property
    def stats(self) -> EngineStats:
        """The counters of all engines that this run has had."""
        return joined_stats(self._stats_before, self.engine.stats)

    def abort(self, request_id: str, index: int | None = None) -> None:
        client = self.engine.client
        if client.failure is None:
            try:
                client.abort(request_id, index)
            except EngineDeadError:
                pass  # the request ended with its engine; the empty event list that reports it is on its way

    def set_target_concurrency(self, left: WorkLeft, *, num_workers: int = 1) -> None:
        """Limit how many sequences run at once, now that the whole input is known: more than keep the device busy until
        the longest answer ends would only lengthen the tail. The work is divided over `num_workers`."""
        longest = max(left.longest_waiting, left.longest_running)
        num_tokens = left.num_decode_tokens + left.num_running_decode_tokens
        num_seqs = target_concurrency_of(round(num_tokens / num_workers), round(longest), self.engine.settings)
        if num_seqs is not None and self.is_running:
            try:
                self.engine.client.limit_running(num_seqs)
            except EngineDeadError as error:
                self._death = error.with_traceback(None)

    def release_dead(self) -> DeadEngine:
        """Drop every reference to the engine, which has died, and free its memory."""
        engine = self.engine
        failure = engine.client.failure or self._death
        assert failure is not None
        dead = DeadEngine(failure, engine.settings, isinstance(engine.client, (EngineProcess, SharedClient)))
        self._stats_before = self.stats
        self.engine = replace(engine, client=DeadClient(failure), model=None)
        del engine
        self.close()
        return dead

    def close(self) -> None:
        if self._starting is not None:
            self._end_start(self._starting)
        if self._live is None:
            return
        engine, self._live = self._live, None
        engine.close()
        self._gate.is_open = False
        failure = engine.client.failure
        del engine
        if failure is not None:
            _free_memory(failure)

    def _end_start(self, starting: Future[Engine]) -> None:
        """Close an engine that is being started. One in a process of its own need not be waited for: it ends with this
        process, if not before."""
        self._starting = None
        self._gate.is_open = False
        starting.add_done_callback(_close_started)
        if not self._has_own_process:
            wait([starting])


def _close_started(starting: Future[Engine]) -> None:
    if starting.exception() is None:
        starting.result().close()


class _Gate:
    """Drops events after its engine was closed."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self.is_open = True

    def deliver(self, events: list[SequenceEvent]) -> None:
        if self.is_open:
            self._deliver(events)


class DeadClient:
    """Takes the place of a dead engine's client, so that nothing refers to the engine."""

    def __init__(self, failure: BaseException) -> None:
        self.failure: BaseException | None = failure
        self.stats = EngineStats(SchedulerStats(), 0.0, 0.0)

    def submit(self, request: Request) -> None:
        raise EngineDeadError(f"the engine has stopped: {self.failure}")

    def abort(self, request_id: str, index: int | None = None) -> None:
        pass

    def limit_running(self, num_seqs: int | None) -> None:
        pass

    def forget_prefixes(self) -> None:
        pass

    def start_profile(self, options: ProfileOptions) -> Future[dict[str, Any]]:
        raise EngineDeadError(f"the engine has stopped: {self.failure}")

    def stop_profile(self) -> Future[dict[str, Any]]:
        raise EngineDeadError(f"the engine has stopped: {self.failure}")

    def load_adapter(self, name: str, path: str, *, replaces: bool = False) -> Future[None]:
        raise EngineDeadError(f"the engine has stopped: {self.failure}")

    def unload_adapter(self, name: str) -> Future[None]:
        raise EngineDeadError(f"the engine has stopped: {self.failure}")

    def close(self) -> None:
        pass


def _max_sequences(engine: Engine) -> int:
    """How many sequences may be in flight."""
    if isinstance(engine.client, SharedClient):
        return engine.client.max_sequences
    return 2 * engine.settings.max_num_seqs + SPARE_SEQUENCES


def _free_memory(failure: BaseException) -> None:
    """The exception's traceback refers to the frames that raised it, and these refer to the weights."""
    seen: BaseException | None = failure
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    garbage.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        try:
            torch.cuda.empty_cache()
        except RuntimeError:
            pass  # the device is lost: the next start will report it
