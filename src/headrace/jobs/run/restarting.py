"""Replaces engines that have died: `RecoveryPolicy` decides, the worker starts another one after a delay.

    worker has died ─▶ its events are taken, its engine is released ─▶ its lines wait in RetryQueue
                    ─▶ delay ─▶ start, on a thread of its own ─▶ the worker runs again

Nothing here waits: the main loop goes on with the other workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic

from headrace.config import EngineConfig
from headrace.errors import ResumableJobError
from headrace.jobs.recovery.policy import Progress, WorkerDeath
from headrace.jobs.run.context import RunContext
from headrace.jobs.run.outcomes import Outcomes
from headrace.jobs.run.stop_state import stopping
from headrace.jobs.workers.worker import Worker


@dataclass(frozen=True, slots=True)
class _NextStart:
    """A start that is due at a time, or that is under way."""

    at: float  # `monotonic`
    config: EngineConfig
    num_failures: int = 0  # of starts since the engine has died


class Restarter:
    """Owned by the job's main loop, which calls `check` in every iteration."""

    def __init__(self, context: RunContext, outcomes: Outcomes, take_last_events: Callable[[], None]) -> None:
        """`take_last_events` collects all events that have arrived."""
        self._job = context.job
        self._directory = context.directory
        self._workers = context.workers
        self._planner = context.planner
        self._in_flight = context.in_flight
        self._retries = context.retries
        self._recovery = context.recovery
        self._stop = context.stop
        self._console = context.console
        self._outcomes = outcomes
        self._take_last_events = take_last_events
        # By worker. Some may not have started at all yet: the job begins with those that have.
        self._starts = {
            worker.number: _NextStart(monotonic(), context.recovery.config_of(worker.number))
            for worker in context.workers
            if worker.is_starting
        }

    def check(self) -> None:
        """Look after every worker that has died or that starts."""
        for worker in self._workers:
            if worker.death is not None:
                self._replace(worker)
        if self._starts and not self._stop.is_stopping:
            for worker in self._workers:
                if (start := self._starts.get(worker.number)) is not None:
                    self._continue_start(worker, start)

    @property
    def has_starts(self) -> bool:
        """Whether a start is planned or under way."""
        return bool(self._starts)

    @property
    def seconds_to_next(self) -> float | None:
        """Seconds until a start is due. None: no start is planned."""
        waiting = [start.at for number, start in self._starts.items() if not self._workers[number].is_starting]
        return max(0.0, min(waiting) - monotonic()) if waiting else None

    def _replace(self, worker: Worker) -> None:
        dead = worker.release_dead()
        self._take_last_events()
        self._planner.release(worker.number)
        if self._stop.is_stopping:
            return  # its lines in flight are left to the next run
        number, in_flight = worker.number, self._in_flight
        death = WorkerDeath(number, self._workers.others(worker), in_flight.num_ended[number])
        try:
            restart = self._recovery.engine_died(
                dead.failure,
                in_flight.indices(number),
                self._progress,
                dead.settings,
                had_own_process=dead.had_own_process,
                death=death,
            )
        except ResumableJobError as error:
            raise stopping(self._job, error) from error
        self._requeue(worker)
        if restart is None:
            self._lose(worker, f"its engine dies whatever it runs ({dead.failure})")
            return
        self._console.tell(f"{self._name(worker)}{restart.why}; restarting the engine")
        config = restart.config
        if len(self._workers) > 1 and config.max_model_len is None:
            # Lines that were accepted must still fit, however much memory the other workers have taken since.
            config = replace(config, max_model_len=self._workers.limits.max_model_len)
        self._starts[number] = _NextStart(monotonic() + restart.delay_s, config)

    def _requeue(self, worker: Worker) -> None:
        """Lines in flight run again, except poison lines."""
        for line in self._in_flight.take_all(worker.number):
            self._retries.put(line)
        for line in self._retries.all() if self._recovery.has_poison else ():
            if (error := self._recovery.refuse(line)) is not None:
                self._outcomes.fail_all(self._retries.remove(line.reply.index), error)
        self._outcomes.flush()

    def _continue_start(self, worker: Worker, start: _NextStart) -> None:
        if not worker.is_starting:
            if monotonic() >= start.at:
                worker.begin_start(start.config)
            return
        if not worker.has_started:
            return
        try:
            worker.finish_start()
        except Exception as error:  # noqa: BLE001  the job's edge: an engine may fail to start in any way
            self._start_has_failed(worker, start, error)
            return
        del self._starts[worker.number]
        if self._planner.has_ended:
            self._workers.set_target_concurrency(self._planner.left())

    def _start_has_failed(self, worker: Worker, start: _NextStart, error: Exception) -> None:
        num_failures = start.num_failures + 1
        if self._recovery.may_start_again(num_failures):
            at = monotonic() + self._recovery.start_delay_s(num_failures)
            self._starts[worker.number] = _NextStart(at, start.config, num_failures)
        elif self._workers.others(worker):
            del self._starts[worker.number]
            self._lose(worker, f"its engine could not be started again ({error})")
        else:
            raise stopping(self._job, self._recovery.cannot_start(error)) from None

    def _lose(self, worker: Worker, why: str) -> None:
        self._console.tell(f"{self._name(worker)}{why}; the job goes on without this worker")
        self._recovery.give_up(worker.number, other=self._workers.others(worker)[0])
        self._workers.lose(worker)

    def _name(self, worker: Worker) -> str:
        return f"worker {worker.number}: " if len(self._workers) > 1 else ""

    @property
    def _progress(self) -> Progress:
        if self._directory is None:
            return Progress(self._outcomes.tally.num_done, self._outcomes.tally.num_answered)
        journal = self._directory.journal
        return Progress(journal.num_done, journal.num_done - journal.num_errors)
