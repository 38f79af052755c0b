"""What the parts of a run share."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.jobs.formats.writer import Results
from headrace.jobs.planning.planner import Planner
from headrace.jobs.planning.workload import WINDOW, Window
from headrace.jobs.recovery.disk_full import DiskWait
from headrace.jobs.recovery.policy import RecoveryPolicy
from headrace.jobs.recovery.retry_queue import RetryQueue
from headrace.jobs.run.deadline import Deadline
from headrace.jobs.run.in_flight import LinesInFlight
from headrace.jobs.run.inbox import Inbox
from headrace.jobs.run.stop_state import StopState
from headrace.jobs.spec import JobSpec
from headrace.jobs.status.console import Console
from headrace.jobs.store.directory import JobDirectory
from headrace.jobs.store.failure_log import FailureLog
from headrace.jobs.store.in_flight_file import IN_FLIGHT_NAME, InFlightFile
from headrace.jobs.workers.worker_set import Workers


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Built once for each run, by `build`. The objects belong to the thread of the main loop; only the inbox is filled
    by others."""

    job: JobSpec
    directory: JobDirectory | None  # None: the output is a stream, and nothing is kept of the job
    results: Results
    inbox: Inbox
    workers: Workers
    planner: Planner
    in_flight: LinesInFlight
    retries: RetryQueue
    recovery: RecoveryPolicy
    stop: StopState
    disk: DiskWait
    console: Console

    @classmethod
    def build(
        cls,
        job: JobSpec,
        results: Results,
        *,
        inbox: Inbox,
        workers: Workers,
        console: Console,
        directory: JobDirectory | None = None,
        recovery: RecoveryPolicy | None = None,
        deadline: Deadline | None = None,
        window: Window = WINDOW,
    ) -> RunContext:
        """`workers` deliver their events to `inbox`. A `directory` has begun its epoch."""
        path = None if directory is None else directory.path
        file = InFlightFile(
            None if path is None else path / IN_FLIGHT_NAME,
            epoch=directory.epoch if directory else 0,
            have_processes=workers.have_processes,
        )
        return cls(
            job=job,
            directory=directory,
            results=results,
            inbox=inbox,
            workers=workers,
            planner=Planner(workers.limits, window=window, num_workers=len(workers)),
            in_flight=LinesInFlight(file),
            retries=RetryQueue(),
            recovery=recovery or RecoveryPolicy(FailureLog(None), job.config),
            stop=StopState(job.grace_s, directory=directory, deadline=deadline),
            disk=DiskWait(job.disk_wait_s, directory=path, tell=console.tell),
            console=console,
        )
