"""Decides what follows a failure in a job: which lines run again, whether a new engine starts, and when the job stops.

out of memory ──▶ the next step of the memory ladder ──▶ restart
anything else ──▶ suspects: run the lines again, some of them alone; one that kills the engine alone is poison and
                  becomes an error line ──▶ restart
several deaths without progress, or one poison line after another ──▶ stop; the job can be resumed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from headrace.config import EngineConfig
from headrace.engine.settings import Settings
from headrace.errors import RequestError, ResumableJobError
from headrace.jobs.input.prepare import Work
from headrace.jobs.input.reply import POISON
from headrace.jobs.planning.duplicates import digest_of
from headrace.jobs.recovery.memory_ladder import MemoryLadder, is_out_of_memory
from headrace.jobs.recovery.retry_rules import RetryRules
from headrace.jobs.recovery.suspects import Suspects
from headrace.jobs.store.failure_log import EngineDeath, FailureLog, Loss, PoisonLine, PoisonRequest, Retry, Suspicion

MAX_POISON_IN_A_ROW = 2  # poison lines with no line answered between them; with more, the lines are not the cause

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


class RecoveryPolicy:
    """Owned by the job's main loop. Every decision is written to the failure log before it is carried out."""

    def __init__(
        self,
        log: FailureLog,
        config: EngineConfig,
        *,
        rules: RetryRules | None = None,
        is_done: Callable[[int], bool] = lambda index: False,
    ) -> None:
        """`is_done`: whether an earlier run has a result for the line."""
        self.rules = rules or RetryRules()
        self.log = log
        last = log.last_death()
        self.suspects = Suspects(last.suspicion if last is not None else Suspicion(), is_done)
        self._ladder = MemoryLadder(config, log.events)
        self._random = Random(log.counts.retries.get("engine_error", 0))
        self._num_in_a_row = 0  # deaths in this run without a line done between them
        self._num_done_at_death = -1
        self._reason = "" if last is None else last.reason
        self._poison_lines = {
            event.line for event in log.events if isinstance(event, PoisonLine) and not is_done(event.line)
        }
        self._refused = {event.digest for event in log.events if isinstance(event, PoisonRequest)}

    @property
    def config(self) -> EngineConfig:
        """The user's, with the changes of the memory ladder."""
        return self._ladder.config

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
        if self.suspects.trial is not None:
            self.suspects.finished(index)
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
    ) -> Restart:
        """Decide about a restart. `indices` are the lines that were in flight. `had_own_process`: the device's context
        ended with the process, so this process can still use the device."""
        reason = f"{type(failure).__name__}: {failure}"
        delay_s = self._delay_s(progress.num_done)
        if is_out_of_memory(failure):
            climbed = self._ladder.climb(settings, num_done=progress.num_done)
            if climbed is not None:
                self.log.append(climbed)
                return Restart(self.config, delay_s, f"the device's memory ran out ({reason}): {climbed.rung}")
        is_device_lost = not had_own_process and any(mark in reason for mark in _LOST_DEVICE)
        loss: Loss = "device" if is_device_lost else "engine"
        self._note_death(indices, loss, reason, progress)
        if loss == "device":
            raise ResumableJobError(
                f"the engine died with a device error, and this process cannot use the device any more: {reason}; run "
                "the same command again to continue, with the engine in a process of its own"
            )
        return Restart(self.config, delay_s, f"the engine died: {reason}")

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

    def cannot_start(self, error: BaseException) -> ResumableJobError:
        return ResumableJobError(
            f"the engine died and could not be started again in {self.rules.restarts.max_starts} attempts: {error}; "
            "run the same command again to continue"
        )

    @property
    def status_fields(self) -> dict[str, Any]:
        """The fields of `JobStatus` that describe recovery."""
        return {**self.log.counts.status_fields, "suspects": self.suspects.num_left}

    def _note_death(
        self,
        indices: Iterable[int],
        loss: Loss,
        reason: str,
        progress: Progress,
        *,
        epoch: int | None = None,
        is_suspicious: bool = True,
    ) -> None:
        """`is_suspicious`: whether one of the lines may be the cause."""
        self._reason, last, before = reason, self.log.last_death(), self.suspects.state
        in_flight = sorted(indices)
        poison_line = self.suspects.died(in_flight, loss=loss) if is_suspicious else None
        has_learned = poison_line is not None or self.suspects.state != before
        is_idle = not has_learned and (last is None or progress.num_done == last.num_done)
        num_idle = 1 + (0 if last is None else last.num_idle) if is_idle else 0
        self.log.append(EngineDeath(loss, reason, in_flight, progress.num_done, self.suspects.state, num_idle, epoch))
        if num_idle >= self.rules.max_idle_deaths:
            what = "the job's process was lost" if loss == "process" else "the engine died"
            raise ResumableJobError(
                f"{what} {num_idle} times in a row without a line done between: {reason}; fix the cause, then "
                "run the same command again to continue"
            )
        if poison_line is not None:
            self._mark_poison(poison_line, progress)

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

    def _delay_s(self, num_done: int) -> float:
        self._num_in_a_row = self._num_in_a_row + 1 if num_done == self._num_done_at_death else 1
        self._num_done_at_death = num_done
        return self.rules.delay_s(self._num_in_a_row, self._random)
