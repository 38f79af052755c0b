"""Recognises a job that would wait for ever. Every wait of a job has something that ends it:

    a line    not read yet            the input goes on, or ends
              in the planner          a worker that runs and has room
              waits to run again      the end of its delay, then a worker: any, or the one whose trial it is in
              in flight               its last event, or the death of its worker
              is a duplicate          the result of its original
    a worker  has died                the next iteration of the main loop
              waits to be started     the end of its delay
              starts                  the end of the start, in either way

If lines are left and none of this is under way, the job has a fault. It stops with its state instead of staying silent.
"""

from __future__ import annotations

from headrace.errors import ResumableJobError
from headrace.jobs.run.context import RunContext
from headrace.jobs.run.restarting import Restarter
from headrace.jobs.workers.worker import Worker


class StallCheck:
    """Owned by the job's main loop. Asked before and after lines are submitted: if nothing was under way at either
    time, and no line could start, then none ever will."""

    def __init__(self, context: RunContext, restarter: Restarter) -> None:
        self._workers = context.workers
        self._planner = context.planner
        self._in_flight = context.in_flight
        self._retries = context.retries
        self._recovery = context.recovery
        self._restarter = restarter

    @property
    def is_idle(self) -> bool:
        """Whether lines are left and nothing is under way that could change which of them may start."""
        if self._in_flight or not self._planner.has_ended or self._restarter.has_starts:
            return False
        if not self._retries and not self._planner.num_held:
            return False
        is_delayed = self._retries.seconds_to_next is not None
        return not is_delayed and all(worker.is_running or self._workers.is_lost(worker) for worker in self._workers)

    def error(self) -> ResumableJobError:
        num_left = max(len(self._retries), self._planner.num_held)
        workers = "; ".join(self._state_of(worker) for worker in self._workers)
        return ResumableJobError(
            f"{num_left:,} lines are left, but none is in flight and none can start ({self._planner.num_waiting:,} "
            f"planned, {len(self._retries):,} to run again; {workers}): this is a fault of Headrace, please report it "
            "with this message; run the same command again to continue"
        )

    def _state_of(self, worker: Worker) -> str:
        state = "lost" if self._workers.is_lost(worker) else "running"
        trial = self._recovery.suspects_of(worker.number).trial
        return f"worker {worker.number}: {state}, " + ("no trial" if trial is None else f"trial of {len(trial)} lines")
