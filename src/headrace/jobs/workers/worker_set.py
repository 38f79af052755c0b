"""The workers of a job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.engine.core import EngineStats
from headrace.engine.joined_stats import summed_stats
from headrace.engine.start import Engine
from headrace.jobs.planning.workload import WorkLeft
from headrace.jobs.workers.worker import Worker
from headrace.sched import SchedulerLimits


class Workers:
    """Owned by the job's main loop. A worker's number is its place."""

    def __init__(self, workers: Sequence[Worker], *, have_processes: bool = False, num_gpus: int = 1) -> None:
        """`have_processes`: no engine runs in this process, so that none can end it. `num_gpus`: that they hold, if
        they run on GPUs."""
        self._workers = list(workers)
        self.num_gpus = num_gpus
        self.have_processes = have_processes
        self._lost: set[int] = set()

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def __getitem__(self, number: int) -> Worker:
        return self._workers[number]

    @property
    def engine(self) -> Engine:
        """What the job needs to know about its engines: model, tokenizer, settings."""
        return self._workers[0].engine

    @property
    def limits(self) -> SchedulerLimits:
        """Those that every worker keeps."""
        return min((worker.settings.limits for worker in self._workers), key=lambda limits: limits.max_model_len)

    @property
    def running(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.is_running]

    @property
    def stats(self) -> EngineStats:
        return summed_stats([worker.stats for worker in self._workers])

    @property
    def start_seconds(self) -> float:
        return max(worker.engine.start_seconds for worker in self._workers)

    def set_target_concurrency(self, left: WorkLeft) -> None:
        for worker in (running := self.running):
            worker.set_target_concurrency(left, num_workers=len(running))

    # Workers that the job goes on without.

    def lose(self, worker: Worker) -> None:
        self._lost.add(worker.number)

    def is_lost(self, worker: Worker) -> bool:
        return worker.number in self._lost

    def others(self, worker: Worker) -> list[int]:
        """The numbers of all other workers that are not lost."""
        return [other.number for other in self._workers if other is not worker and other.number not in self._lost]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
