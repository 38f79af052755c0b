"""What happens when a job's engine has died: another one, with less memory or fewer rows beside each other, or the end.

out of memory ──▶ the next rung of the ladder ──▶ restart
anything else ──▶ suspects: requeue, or run some alone; one alone is poison and becomes an error line ──▶ restart
nothing done and nothing learned over several deaths, or row after row poison ──▶ stop, resumable, with a diagnosis
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
from headrace.jobs.recovery.retries import RetryRules
from headrace.jobs.recovery.suspects import Suspects
from headrace.jobs.store.failure_log import EngineDeath, FailureLog, Loss, PoisonLine, PoisonRequest, Retry, Suspicion

MAX_POISON_IN_A_ROW = 2  # rows, with none answered between them: more, and it is not the rows

_LOST_DEVICE = ("CUDA error:", "cudaError", "CUDNN_STATUS_EXECUTION_FAILED", "CUBLAS_STATUS_EXECUTION_FAILED")


@dataclass(frozen=True, slots=True)
class Progress:
    """Of the whole job, all its runs."""

    num_done: int
    num_answered: int


@dataclass(frozen=True, slots=True)
class Restart:
    config: EngineConfig
    delay_s: float
    why: str


class Recovery:
    """Owned by the job's run. All it decides is written to the log before it is done."""

    def __init__(
        self,
        log: FailureLog,
        config: EngineConfig,
        *,
        rules: RetryRules | None = None,
        is_done: Callable[[int], bool] = lambda row: False,
    ) -> None:
        """`is_done`: whether an earlier run has done the row."""
        self.rules = rules or RetryRules()
        self.log = log
        last = log.last_death()
        self.suspects = Suspects(last.suspicion if last is not None else Suspicion(), is_done)
        self._ladder = MemoryLadder(config, log.events)
        self._random = Random(log.counts.retries.get("engine_error", 0))
        self._num_in_a_row = 0  # deaths of this run, without a row done between them
        self._num_done_at_death = -1
        self._reason = "" if last is None else last.reason
        self._convicted = {
            event.line for event in log.events if isinstance(event, PoisonLine) and not is_done(event.line)
        }
        self._refused = {event.digest for event in log.events if isinstance(event, PoisonRequest)}

    @property
    def config(self) -> EngineConfig:
        """The user's, but for what the memory's ladder has changed."""
        return self._ladder.config

    def may_retry(self, row: int, cause: str) -> float | None:
        """After how many seconds the row may be tried again; None: it was tried often enough."""
        num_failures = self.log.num_retries[row] + 1
        if num_failures >= self.rules.max_attempts:
            return None
        self.log.append(Retry(row, cause))
        return self.rules.delay_s(num_failures, self._random)

    def done(self, row: int) -> None:
        """The row has its result."""
        if self.suspects.trial is not None:
            self.suspects.finished(row)
        if self.log.num_retries:
            self.log.forget_done(row)

    @property
    def status_fields(self) -> dict[str, Any]:
        """Of `JobStatus`."""
        return {**self.log.counts.status_fields, "suspects": self.suspects.num_left}

    def process_was_lost(self, epoch: int, rows: Sequence[int], progress: Progress) -> None:
        """That of the run before this one, without a word and with these rows in flight. It is noted once, however
        often the next one is started."""
        last = self.log.last_death()
        if last is None or last.epoch != epoch:
            self._note_death(rows, "process", "the process of the job ended without a word", progress, epoch=epoch)

    def engine_died(
        self, failure: BaseException, rows: Iterable[int], progress: Progress, settings: Settings, *, is_apart: bool
    ) -> Restart:
        """`is_apart`: it had a process of its own, with which its device's context has gone too."""
        reason = f"{type(failure).__name__}: {failure}"
        delay_s = self._delay_s(progress.num_done)
        if is_out_of_memory(failure):
            climbed = self._ladder.climb(settings, num_done=progress.num_done)
            if climbed is not None:
                self.log.append(climbed)
                return Restart(self.config, delay_s, f"the device's memory ran out ({reason}): {climbed.rung}")
        loss: Loss = "device" if not is_apart and any(mark in reason for mark in _LOST_DEVICE) else "engine"
        self._note_death(rows, loss, reason, progress)
        if loss == "device":
            raise ResumableJobError(
                f"the engine died with its device, which this process cannot use any more: {reason}; the same command "
                "goes on, with the engine in a process of its own"
            )
        return Restart(self.config, delay_s, f"the engine died: {reason}")

    @property
    def has_poison(self) -> bool:
        """Whether there is anything to `refuse`."""
        return bool(self._convicted or self._refused)

    def refuse(self, work: Work) -> RequestError | None:
        """The error that a row becomes which was convicted, or which asks for the same as one that was."""
        digest = digest_of(work)
        if work.reply.index in self._convicted:
            if digest is not None and digest not in self._refused:
                self.log.append(PoisonRequest(digest))
                self._refused.add(digest)
        elif digest is None or digest not in self._refused:
            return None
        return RequestError(
            f"the engine died again and again with this line, at last with no other beside it ({self._reason}); "
            "--retry-errors tries it again",
            code=POISON,
        )

    def cannot_start(self, error: BaseException) -> ResumableJobError:
        return ResumableJobError(
            f"the engine died and could not be started again in {self.rules.max_starts} attempts: {error}; the same "
            "command goes on from there"
        )

    def _note_death(
        self, rows: Iterable[int], loss: Loss, reason: str, progress: Progress, *, epoch: int | None = None
    ) -> None:
        self._reason, last, before = reason, self.log.last_death(), self.suspects.state
        in_flight = sorted(rows)
        convicted = self.suspects.died(in_flight, loss=loss)
        has_learned = convicted is not None or self.suspects.state != before
        is_idle = not has_learned and (last is None or progress.num_done == last.num_done)
        num_idle = 1 + (0 if last is None else last.num_idle) if is_idle else 0
        self.log.append(EngineDeath(loss, reason, in_flight, progress.num_done, self.suspects.state, num_idle, epoch))
        if num_idle >= self.rules.max_idle_deaths:
            raise ResumableJobError(
                f"the engine died {num_idle} times in a row without a line done between: {reason}; find its cause, "
                "then the same command goes on from there"
            )
        if convicted is not None:
            self._convict(convicted, progress)

    def _convict(self, row: int, progress: Progress) -> None:
        """Unless rows before it were convicted too and none was answered since: then no row is to blame."""
        earlier = [event for event in self.log.events if isinstance(event, PoisonLine)][-MAX_POISON_IN_A_ROW:]
        if len(earlier) == MAX_POISON_IN_A_ROW and earlier[0].num_answered == progress.num_answered:
            lines = ", ".join(str(event.line + 1) for event in earlier)
            raise ResumableJobError(
                f"the engine dies with every line that it is given alone (lines {lines} and {row + 1}) and has "
                "answered none between: it is probably not they that are wrong, but the model, the device or a "
                f"setting; the last time: {self._reason}; find the cause, then the same command goes on, and "
                "--retry-errors does those lines again"
            )
        self.log.append(PoisonLine(row, progress.num_answered))
        self._convicted.add(row)

    def _delay_s(self, num_done: int) -> float:
        self._num_in_a_row = self._num_in_a_row + 1 if num_done == self._num_done_at_death else 1
        self._num_done_at_death = num_done
        return self.rules.delay_s(self._num_in_a_row, self._random)

    def start_delay_s(self, num_failures: int) -> float:
        return self.rules.delay_s(num_failures, self._random)
