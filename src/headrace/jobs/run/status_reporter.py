"""What a job's run tells of itself: progress, `status.json` and metrics once a second, a report at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

from headrace.jobs.planning.planner import Planner
from headrace.jobs.recovery.disk_full import DiskWait
from headrace.jobs.recovery.policy import Recovery
from headrace.jobs.run.current_engine import CurrentEngine
from headrace.jobs.run.ending import Ending
from headrace.jobs.run.in_flight import LinesInFlight
from headrace.jobs.run.outcomes import Outcomes
from headrace.jobs.spec import JobSpec
from headrace.jobs.status.meter import JobMeter, MeterFacts, saved_by
from headrace.jobs.status.progress import JobProgress
from headrace.jobs.status.report import JobReport
from headrace.jobs.store.directory import JobDirectory
from headrace.jobs.store.status_file import STATUS_NAME, JobState, JobStatus, StatusFile


class Bulletin:
    """Owned by the job's run. It looks at the others' counts and changes none."""

    def __init__(
        self,
        job: JobSpec,
        current: CurrentEngine,
        *,
        planner: Planner,
        in_flight: LinesInFlight,
        outcomes: Outcomes,
        recovery: Recovery,
        disk: DiskWait,
        directory: JobDirectory | None,
        progress: JobProgress,
        watch: Callable[[JobStatus], None],
        num_expected: int | None,
    ) -> None:
        self._job = job
        self._current = current
        self._planner = planner
        self._in_flight = in_flight
        self._outcomes = outcomes
        self._recovery = recovery
        self._disk = disk
        self._directory = directory
        self._progress = progress
        self._watch = watch
        self._started_at = perf_counter()
        self._status_file = StatusFile(directory.path / STATUS_NAME if directory else None)
        engine = current.engine
        self._meter = JobMeter(
            MeterFacts(
                output=job.output,
                model=engine.model_name,
                settings=engine.settings,
                start_seconds=engine.start_seconds,
                gpu_price=job.gpu_price,
                num_before=directory.num_before if directory else 0,
            )
        )
        self.num_expected = num_expected  # lines of this run, as far as is known

    @property
    def is_due(self) -> bool:
        return self._meter.is_due

    def tell(self, line: str) -> None:
        self._progress.tell(line)

    def show(self, state: JobState) -> None:
        status = self._meter.look(
            self._current.stats,
            self._outcomes.tally,
            self._planner,
            num_total=self.num_expected,
            num_in_flight=len(self._in_flight),
            has_ended=self._planner.has_ended,
            writing_seconds=self._outcomes.writing_seconds,
            state=state,
        )
        status = replace(status, **self._recovery.status_fields)
        if state == "running" and self._disk.is_full:
            status = replace(status, state="paused", paused_because=self._disk.reason)
        if self._directory is not None:
            status = replace(status, **self._directory.journal_fields(self._outcomes.tally.errors))
        self._progress.update(status)
        self._watch(status)
        if self._directory is None or self._directory.is_ours():
            self._status_file.write(status, now=status.state != "running")

    def report(self, ending: Ending) -> JobReport:
        engine, stats = self._current.engine, self._current.stats
        return JobReport(
            output=self._job.output,
            model_name=engine.model_name,
            was_stopped=ending.has_begun and not ending.is_expired,
            was_expired=ending.is_expired,
            was_cancelled=ending.is_cancelled,
            num_in_flight=len(self._in_flight),
            tally=self._outcomes.tally,
            seconds=perf_counter() - self._started_at,
            start_seconds=engine.start_seconds,
            stats=stats,
            choices=engine.settings.choices,
            saved=saved_by(stats, self._planner),
            trouble=self._recovery.log.counts,
            is_on_gpu=engine.settings.device == "cuda",
            gpu_price=self._job.gpu_price,
        )
