"""Decides what follows a failure in a job: which lines run again, whether a new engine starts, and when the job stops.

out of memory ──▶ the next step of the memory ladder ──▶ restart
anything else ──▶ suspects: run the lines again, some of them alone; one that kills the engine alone is poison and
                  becomes an error line ──▶ restart
several deaths without progress, or one poison line after another ──▶ stop; the job can be resumed

Each worker has its own suspects and its own memory ladder. The lines of a death run again on any worker; once two
deaths have lines in common, the search stays on one worker, and the others go on. A line is poison only if its worker
has answered others since the search began, or if it kills a second worker too: a worker that answers nothing is itself
the cause, and after several such deaths the job goes on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from msgspec import UNSET

from headrace.config import EngineConfig
from headrace.engine.settings import Settings
from headrace.errors import MachineLostError, RequestError, ResumableJobError
from headrace.jobs.input.prepare import Work
from headrace.jobs.input.reply import POISON
from headrace.jobs.planning.duplicates import digest_of
from headrace.jobs.recovery.memory_ladder import MemoryLadder, is_out_of_memory
from headrace.jobs.recovery.retry_rules import RetryRules
from headrace.jobs.recovery.suspects import EVIDENCE, Suspects
from headrace.jobs.store.failure_log import (
    EngineDeath,
    FailureLog,
    Loss,
    PoisonLine,
    PoisonRequest,
    Retry,
    Suspicion,
    Trial,
)

MAX_POISON_IN_A_ROW = 2  # poison lines with no line answered between them; with more, the lines are not the cause

MAX_FRUITLESS = 2  # searches on a worker that answered no line meanwhile; then the job goes on without the worker

_LOST_DEVICE = ("CUDA error:", "cudaError", "CUDNN_STATUS_EXECUTION_FAILED", "CUBLAS_STATUS_EXECUTION_FAILED")


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the whole job, over all its runs."""

    num_done: int
    num_answered: int


@dataclass(frozen=True, slots=True)
class Restart:
    """The decision to start a new engine."""

    config: EngineConfig
    delay_s: float
    why: str


@dataclass(slots=True)
class _WorkerState:
    """What the policy knows about one worker."""

    suspects: Suspects
    ladder: MemoryLadder
    num_in_a_row: int = 0  # deaths in this run without a line done between them
    num_done_at_death: int = -1
    num_ended_at_first_death: int = 0  # lines that had ended on it when its search began
    num_fruitless: int = 0


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """A worker whose engine has died, in a job with several. Alone, it has no `others`."""

    worker: int = 0
    others: Sequence[int] = field(default=())  # that still run or start
    num_ended: int = 0  # lines that have ended on it, in this run


ALONE = WorkerDeath()


class RecoveryPolicy:
    """Owned by the job's main loop. Every decision is written to the failure log before it is carried out."""

    def __init__(
        self,
        log: FailureLog,
        config: EngineConfig,
        *,
        rules: RetryRules | None = None,
        is_done: Callable[[int], bool] = lambda index: False,
        shares: Sequence[tuple[EngineConfig, int]] = (),
    ) -> None:
        """`is_done`: whether an earlier run has a result for the line. `shares`: for each worker its config, and how
        many workers divide the memory of its device; without them, there is one worker with `config`."""
        self.rules = rules or RetryRules()
        self.log = log
        last = log.last_death()
        self._states = [
            _WorkerState(Suspects(Suspicion()), MemoryLadder(own, log.events, worker=worker, num_sharing=num_sharing))
            for worker, (own, num_sharing) in enumerate(shares or ((config, 1),))
        ]
        for death in log.last_deaths():  # the earlier run may have had more workers
            state = Suspects(death.suspicion, is_done).state
            self._states[death.worker % len(self._states)].suspects.adopt(state)
        self._tried_elsewhere: set[int] = set()  # lines that were alone on two workers
        self._note_searches()
        self._random = Random(log.counts.retries.get("engine_error", 0))
        self._reason = "" if last is None else last.reason
        self._poison_lines = {
            event.line for event in log.events if isinstance(event, PoisonLine) and not is_done(event.line)
        }
        self._refused = {event.digest for event in log.events if isinstance(event, PoisonRequest)}

    def config_of(self, worker: int) -> EngineConfig:
        """The worker's part of the user's config, with the changes of its memory ladder."""
        return self._states[worker].ladder.config

    def suspects_of(self, worker: int) -> Suspects:
        return self._states[worker].suspects

    def reserved(self) -> dict[int, int]:
        """Lines that run on one worker only, in its trials, and that worker."""
        return {index: worker for worker, state in enumerate(self._states) for index in state.suspects.lines}

    def is_suspect(self, index: int) -> bool:
        """Whether the line runs in isolation, now or later."""
        return any(index in state.suspects for state in self._searching)

    @property
    def is_searching(self) -> bool:
        return bool(self._searching)

    def _note_searches(self) -> None:
        """Called after each change of suspects: the workers that search, since there are many that do not."""
        self._searching = [state for state in self._states if state.suspects.is_searching]

    def forget_suspects(self, worker: int, indices: Iterable[int]) -> None:
        """The lines cannot run: they are missing from the input."""
        self._states[worker].suspects.forget(indices)
        self._note_searches()

    # Lines.

    def decide_retry(self, index: int, cause: str) -> float | None:
        """Whether a line that ended with an engine error runs again: the delay in seconds, or None after the last
        attempt."""
        num_failures = self.log.num_retries[index] + 1
        if num_failures >= self.rules.max_attempts:
            return None
        self.log.append(Retry(index, cause))
        return self.rules.delay_s(num_failures, self._random)

    def done(self, index: int) -> None:
        """The line has its result."""
        if self._searching:
            for state in self._searching:
                state.suspects.finished(index)
            if not all(state.suspects.is_searching for state in self._searching):
                self._note_searches()
        if self.log.num_retries:
            self.log.forget_done(index)

    @property
    def has_poison(self) -> bool:
        """Whether `refuse` can return an error for any line."""
        return bool(self._poison_lines or self._refused)

    def refuse(self, work: Work) -> RequestError | None:
        """The error for a poison line, or for a line that makes the same request as one. None: the line may run."""
        digest = digest_of(work)
        if work.reply.index in self._poison_lines:
            if digest is not None and digest not in self._refused:
                self.log.append(PoisonRequest(digest))
                self._refused.add(digest)
        elif digest is None or digest not in self._refused:
            return None
        return RequestError(
            f"the engine died repeatedly with this line, at last while it ran alone ({self._reason}); "
            "--retry-errors tries it again",
            code=POISON,
        )

    # Engines.

    def engine_died(
        self,
        failure: BaseException,
        indices: Iterable[int],
        progress: Progress,
        settings: Settings,
        *,
        had_own_process: bool,
        death: WorkerDeath = ALONE,
    ) -> Restart | None:
        """Decide about a restart. `indices` are the lines that were in flight. `had_own_process`: the device's context
        ended with the process, so this process can still use the device. None: the job goes on without the worker."""
        reason = f"{type(failure).__name__}: {failure}"
        state = self._states[death.worker]
        delay_s = self._delay_s(state, death.num_ended if death.others else progress.num_done)
        if is_out_of_memory(failure):
            climbed = state.ladder.climb(settings, num_done=progress.num_done)
            if climbed is not None:
                self.log.append(climbed)
                config = self.config_of(death.worker)
                return Restart(config, delay_s, f"the device's memory ran out ({reason}): {climbed.rung}")
        is_device_lost = not had_own_process and any(mark in reason for mark in _LOST_DEVICE)
        loss: Loss = "device" if is_device_lost else "engine"
        is_machine_lost = isinstance(failure, MachineLostError)  # with all its workers, perhaps at once
        self._note_death(indices, loss, reason, progress, death=death, is_suspicious=not is_machine_lost)
        if loss == "device":
            raise ResumableJobError(
                f"the engine died with a device error, and this process cannot use the device any more: {reason}; run "
                "the same command again to continue, with the engine in a process of its own"
            )
        if death.others and not is_machine_lost and self._is_cause(state):
            return None
        return Restart(self.config_of(death.worker), delay_s, f"the engine died: {reason}")

    def _is_cause(self, state: _WorkerState) -> bool:
        """Whether the worker dies whatever it runs. While it searches, deaths in a row are expected."""
        is_idle = state.suspects.trial is None and state.num_in_a_row >= self.rules.max_idle_deaths
        return is_idle or state.num_fruitless >= MAX_FRUITLESS

    def give_up(self, worker: int, *, other: int) -> None:
        """The job goes on without the worker; another one goes on with its search."""
        suspects = self._states[worker].suspects
        self._states[other].suspects.adopt(suspects.state)
        suspects.forget(suspects.lines)
        self._note_searches()

    def process_was_lost(
        self, epoch: int, indices: Sequence[int], progress: Progress, *, had_own_process: bool
    ) -> None:
        """The process of the run before this one ended without a message, with these lines in flight. It is logged
        once, however often the next run is started. `had_own_process`: its engine was in another process. Then no line
        is suspected: one that kills its engine does not kill the job, but a preempted container does."""
        last = self.log.last_death()
        if last is None or last.epoch != epoch:
            self._note_death(
                indices,
                "process",
                "the job's process ended without a message",
                progress,
                epoch=epoch,
                is_suspicious=not had_own_process,
            )

    def start_delay_s(self, num_failures: int) -> float:
        """Returns the delay before the next attempt to start an engine, after so many failed starts in a row."""
        return self.rules.delay_s(num_failures, self._random)

    def may_start_again(self, num_failures: int) -> bool:
        """Whether an engine that could not be started so many times in a row is started once more."""
        return num_failures < self.rules.restarts.max_starts

    def cannot_start(self, error: BaseException) -> ResumableJobError:
        return ResumableJobError(
            f"the engine died and could not be started again in {self.rules.restarts.max_starts} attempts: {error}; "
            "run the same command again to continue"
        )

    @property
    def status_fields(self) -> dict[str, Any]:
        """The fields of `JobStatus` that describe recovery."""
        return {**self.log.counts.status_fields, "suspects": sum(state.suspects.num_left for state in self._states)}

    def _note_death(
        self,
        indices: Iterable[int],
        loss: Loss,
        reason: str,
        progress: Progress,
        *,
        epoch: int | None = None,
        is_suspicious: bool = True,
        death: WorkerDeath = ALONE,
    ) -> None:
        """`is_suspicious`: whether one of the lines may be the cause."""
        state = self._states[death.worker]
        suspects = state.suspects
        self._reason, last, before = reason, self.log.last_death(), suspects.state
        in_flight = sorted(indices)
        if suspects.trial is None:
            state.num_ended_at_first_death = death.num_ended
            for other in self._states:  # some of the lines may have been in flight when another worker died
                if other is not state:
                    both = set(other.suspects.state.last).intersection(in_flight)
                    suspects.adopt(Suspicion(sorted(both), []))
        poison_line = suspects.died(in_flight, loss=loss) if is_suspicious else None
        self._note_searches()
        has_learned = poison_line is not None or suspects.state != before
        is_idle = not has_learned and (last is None or progress.num_done == last.num_done)
        is_idle = is_idle and (is_suspicious or loss == "process")
        num_idle = 1 + (0 if last is None else last.num_idle) if is_idle else 0
        self.log.append(
            EngineDeath(
                loss, reason, in_flight, progress.num_done, suspects.state, num_idle, epoch, death.worker or UNSET
            )
        )
        if num_idle >= self.rules.max_idle_deaths:
            what = "the job's process was lost" if loss == "process" else "the engine died"
            raise ResumableJobError(
                f"{what} {num_idle} times in a row without a line done between: {reason}; fix the cause, then "
                "run the same command again to continue"
            )
        if poison_line is None:
            return
        has_answered = state.num_ended_at_first_death != death.num_ended
        if death.others and not has_answered and poison_line not in self._tried_elsewhere:
            self._try_elsewhere(poison_line, loss, death)
        else:
            state.num_fruitless = 0
            self._mark_poison(poison_line, progress)

    def _try_elsewhere(self, index: int, loss: Loss, death: WorkerDeath) -> None:
        """The worker died with the line alone, but has answered no other since its search began: the cause may be the
        worker. One more death with the line alone, on another worker, is proof."""
        self._states[death.worker].num_fruitless += 1
        self._tried_elsewhere.add(index)
        trial = Trial([index], False, 1, EVIDENCE[loss])
        self._states[death.others[0]].suspects.adopt(Suspicion([], [trial]))
        self._note_searches()

    def _mark_poison(self, index: int, progress: Progress) -> None:
        """Mark the line as poison, unless the lines before it were poison too and none was answered since: then the
        lines are not the cause."""
        earlier = [event for event in self.log.events if isinstance(event, PoisonLine)][-MAX_POISON_IN_A_ROW:]
        if len(earlier) == MAX_POISON_IN_A_ROW and earlier[0].num_answered == progress.num_answered:
            lines = ", ".join(str(event.line + 1) for event in earlier)
            raise ResumableJobError(
                f"the engine dies with every line that it runs alone (lines {lines} and {index + 1}) and has answered "
                "none between: the cause is probably not these lines but the model, the device or a setting; the last "
                f"error: {self._reason}; fix the cause, then run the same command again to continue; --retry-errors "
                "runs those lines again"
            )
        self.log.append(PoisonLine(index, progress.num_answered))
        self._poison_lines.add(index)

    def _delay_s(self, state: _WorkerState, num_done: int) -> float:
        state.num_in_a_row = state.num_in_a_row + 1 if num_done == state.num_done_at_death else 1
        state.num_done_at_death = num_done
        return self.rules.delay_s(state.num_in_a_row, self._random)
