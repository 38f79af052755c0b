"""The figures of each worker of a job, if there are several, and their text."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.engine.core import EngineStats
from headrace.jobs.store.status_file import TokenRates, WorkerState, WorkerStatus

NOW_SECONDS = 10.0  # the interval of the rates
MAX_LISTED = 8  # workers on a line of progress; of more, only the totals


@dataclass(frozen=True, kw_only=True)
class WorkerReading:
    """One worker at one time."""

    state: WorkerState
    stats: EngineStats
    num_ended: int  # lines
    num_restarts: int


class WorkerMeters:
    """Owned by the status reporter: remembers the tokens of the last seconds, for the rates."""

    def __init__(self) -> None:
        self._snapshots: deque[tuple[float, list[EngineStats]]] = deque()

    def measure(self, readings: Sequence[WorkerReading], *, at: float) -> list[WorkerStatus]:
        """`at`: the time of the readings, which are of all workers in their order."""
        self._snapshots.append((at, [reading.stats for reading in readings]))
        while len(self._snapshots) > 2 and at - self._snapshots[1][0] >= NOW_SECONDS:
            self._snapshots.popleft()
        before_at, before = self._snapshots[0]
        seconds = max(1e-9, at - before_at)
        return [
            WorkerStatus(
                number=number,
                state=reading.state,
                lines_done=reading.num_ended,
                sequences_running=reading.stats.scheduler.num_running,
                sequences_waiting=reading.stats.scheduler.num_waiting,
                kv_use=reading.stats.scheduler.kv_use,
                rates_now=_rates(before[number], reading.stats, seconds),
                restarts=reading.num_restarts,
            )
            for number, reading in enumerate(readings)
        ]


def _rates(before: EngineStats, now: EngineStats, seconds: float) -> TokenRates:
    earlier, later = before.scheduler, now.scheduler
    return TokenRates(
        prompt=max(0, later.num_prompt_tokens - earlier.num_prompt_tokens) / seconds,
        completion=max(0, later.num_generated_tokens - earlier.num_generated_tokens) / seconds,
    )


def progress_text(workers: Sequence[WorkerStatus]) -> str | None:
    """What the workers do now. None: there is only one."""
    if not workers:
        return None
    if len(workers) <= MAX_LISTED:
        return "workers " + ", ".join(f"{worker.number}: {now_text(worker)}" for worker in workers)
    states = Counter(worker.state for worker in workers)
    restarts = sum(worker.restarts for worker in workers)
    return f"workers {', '.join(f'{count:,} {state}' for state, count in states.most_common())}{_restarts(restarts)}"


def now_text(worker: WorkerStatus) -> str:
    what = f"{worker.sequences_running:,} running, {worker.rates_now.completion:,.0f} tok/s"
    return f"{what if worker.state == 'running' else worker.state}{_restarts(worker.restarts)}"


def summary_rows(workers: Sequence[WorkerStatus]) -> list[tuple[str, str]]:
    """A row for each worker."""
    return [
        (f"worker {worker.number}", f"{worker.lines_done:,} lines{_restarts(worker.restarts)}{_end(worker)}")
        for worker in workers
    ]


def _end(worker: WorkerStatus) -> str:
    return ", given up" if worker.state == "lost" else ""


def _restarts(count: int) -> str:
    return f", restarts {count:,}" if count else ""
