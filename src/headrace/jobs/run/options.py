"""How a job is run, apart from what it computes (`JobSpec`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.jobs.recovery.job_engine import Start
from headrace.jobs.recovery.retry_rules import RetryRules
from headrace.jobs.run.deadline import Deadline
from headrace.jobs.status.console import Console

if TYPE_CHECKING:
    from headrace.jobs.workers.on_ray.cluster import RayCluster

OnBegin = Callable[[Callable[[], None]], None]  # called with a function that stops the run


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    # How engines are started, for each worker or for all. None: one on a thread, or in a process if an earlier run lost
    # its own; several in processes.
    start: Start | Sequence[Start] | None
    rules: RetryRules | None
    has_own_process: bool  # the engines of `start` run in other processes
    min_lines_for_process: int  # from that many lines on, a process of its own prepares them
    console: Console
    on_begin: OnBegin | None = None
    cluster: RayCluster | None = None  # where engines run, in place of the job's own address
    deadline: Deadline | None = None  # of the job, with the clock already read
