"""How a job is run, apart from what it computes (`JobSpec`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.jobs.recovery.job_engine import Start
from headrace.jobs.recovery.retry_rules import RetryRules
from headrace.jobs.status.console import Console

if TYPE_CHECKING:
    from headrace.jobs.workers.on_ray.cluster import RayCluster


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    # How engines are started, for each worker or for all. None: one on a thread, or in a process if an earlier run lost
    # its own; several in processes.
    start: Start | Sequence[Start] | None
    rules: RetryRules | None
    min_lines_for_process: int  # from that many lines on, a process of its own prepares them
    console: Console
    cluster: RayCluster | None = None  # where engines run, in place of the job's own address
