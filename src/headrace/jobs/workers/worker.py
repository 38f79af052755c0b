"""What a job's main loop asks of a worker, wherever its engine runs."""

from __future__ import annotations

from typing import Protocol

from headrace.config import EngineConfig
from headrace.engine.core import EngineStats
from headrace.engine.settings import Settings
from headrace.engine.start import Engine
from headrace.jobs.planning.workload import WorkLeft
from headrace.jobs.recovery.job_engine import DeadEngine
from headrace.types import Request


class Worker(Protocol):
    """Has one engine at a time. All methods are called on the thread of the main loop, and only `close` may wait.

        running ──▶ has died ──▶ released ──▶ starting ──▶ running, or released again

    Events go to the job's inbox from any thread. An empty list there says that the state of a worker has changed."""

    number: int  # from 0
    num_restarts: int
    max_sequences: int  # that may be in flight
    engine: Engine  # what the job needs to know about it; its client refuses everything after a death

    @property
    def settings(self) -> Settings: ...

    @property
    def stats(self) -> EngineStats:
        """The counters of all engines that the worker has had."""

    # Requests.

    def submit(self, request: Request) -> None:
        """Raises a RequestError for a request that could never run, and an EngineDeadError if the engine has died."""

    def abort(self, request_id: str, index: int | None = None) -> None: ...

    def set_target_concurrency(self, left: WorkLeft, *, num_workers: int = 1) -> None:
        """Limit how many sequences run at once, for this worker's part of what is left."""

    # State.

    @property
    def is_running(self) -> bool: ...

    @property
    def death(self) -> BaseException | None:
        """Why its engine has died, until `release_dead`."""

    def release_dead(self) -> DeadEngine:
        """Free everything that the dead engine has. No event of it arrives after that."""

    def begin_start(self, config: EngineConfig) -> None:
        """Start another engine without waiting for it."""

    @property
    def is_starting(self) -> bool: ...

    @property
    def has_started(self) -> bool:
        """Whether a start has ended, in either way."""

    def finish_start(self) -> None:
        """Use the engine that has started. Raises what its start has raised."""

    def close(self) -> None: ...
