"""Reports how a job is doing: progress on the console, `status.json` and metrics once a second, a report at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

from headrace.engine.in_force import settings_in_force
from headrace.hardware.gpu_monitor import GpuMonitor
from headrace.jobs.run.context import RunContext
from headrace.jobs.run.outcomes import Outcomes
from headrace.jobs.status.desired_workers import desired_workers
from headrace.jobs.status.gpus import gpu_statuses
from headrace.jobs.status.meter import JobMeter, MeterFacts, saved_by
from headrace.jobs.status.report import JobReport
from headrace.jobs.status.workers import WorkerMeters, WorkerReading
from headrace.jobs.store.status_file import STATUS_NAME, JobState, JobStatus, StatusFile, WorkerStatus


class StatusReporter:
    """Owned by the job's main loop. It reads the counters of the other parts and changes none."""

    def __init__(
        self,
        context: RunContext,
        outcomes: Outcomes,
        *,
        num_expected: int | None,
        on_status: Callable[[JobStatus], None] = lambda status: None,
    ) -> None:
        self._context = context
        self._outcomes = outcomes
        self._on_status = on_status
        self._started_at = perf_counter()
        job, directory, engine = context.job, context.directory, context.workers.engine
        self._status_file = StatusFile(directory.path / STATUS_NAME if directory else None)
        self._meter = JobMeter(
            MeterFacts(
                output=job.output,
                model=engine.model_name,
                settings=engine.settings,
                start_seconds=context.workers.start_seconds,
                gpu_price=job.gpu_price,
                num_before=directory.num_before if directory else 0,
                num_workers=len(context.workers),
                num_gpus=context.workers.num_gpus,
            )
        )
        self._worker_meters = WorkerMeters()
        self._worker_statuses: list[WorkerStatus] = []  # empty if there is only one worker
        self._gpus = GpuMonitor.of_device(engine.settings.device)
        self.num_expected = num_expected  # lines of this run, as far as is known

    @property
    def is_due(self) -> bool:
        return self._meter.is_due

    def show(self, state: JobState) -> None:
        context, tally = self._context, self._outcomes.tally
        status = self._meter.measure(
            context.workers.stats,
            tally,
            context.planner,
            num_total=self.num_expected,
            num_in_flight=len(context.in_flight),
            has_ended=context.planner.has_ended,
            writing_seconds=self._outcomes.writing_seconds,
            state=state,
        )
        if len(context.workers) > 1:
            self._worker_statuses = self._worker_meters.measure(self._read_workers(), at=perf_counter())
        status = replace(status, **context.recovery.status_fields, workers=self._worker_statuses)
        status = replace(status, gpus=gpu_statuses(self._gpus), gpus_missing=self._gpus.now().missing or None)
        if state == "running" and context.disk.is_full:
            status = replace(status, state="paused", paused_because=context.disk.reason)
        if context.directory is not None:
            status = replace(status, **context.directory.journal_fields(tally.errors))
        if state == "running":
            status = replace(status, workers_desired=self._desired_workers(status))
        context.console.update(status)
        self._on_status(status)
        if context.directory is None or context.directory.is_ours():
            self._status_file.write(status, now=status.state != "running")

    def _desired_workers(self, status: JobStatus) -> int:
        workers = self._context.workers
        return desired_workers(
            num_workers=len(workers),
            num_running=len(workers.running),
            lines_left=None if status.lines_total is None else status.lines_total - status.lines_done,
            max_num_seqs=workers.limits.max_num_seqs,
            seconds_left=status.seconds_left,
            seconds_to_deadline=self._context.stop.seconds_to_deadline,
        )

    def _read_workers(self) -> list[WorkerReading]:
        workers, in_flight = self._context.workers, self._context.in_flight
        return [
            WorkerReading(
                state="running" if worker.is_running else "lost" if workers.is_lost(worker) else "starting",
                stats=worker.stats,
                num_ended=in_flight.num_ended[worker.number],
                num_restarts=worker.num_restarts,
            )
            for worker in workers
        ]

    def close(self) -> None:
        """Stop reading the GPUs; `report` has what was read."""
        self._gpus.stop()

    def report(self) -> JobReport:
        context, stop = self._context, self._context.stop
        engine, stats = context.workers.engine, context.workers.stats
        return JobReport(
            output=context.job.output,
            model_name=engine.model_name,
            was_stopped=stop.is_stopping and not stop.is_expired,
            was_expired=stop.is_expired,
            was_cancelled=stop.is_cancelled,
            num_in_flight=len(context.in_flight),
            tally=self._outcomes.tally,
            seconds=perf_counter() - self._started_at,
            start_seconds=context.workers.start_seconds,
            start_stages=engine.start_stages,
            stats=stats,
            choices=engine.settings.choices,
            in_force=settings_in_force(engine.settings, context.job.config),
            spec=engine.spec,
            saved=saved_by(stats, context.planner),
            failures=context.recovery.log.counts,
            is_on_gpu=engine.settings.device == "cuda",
            gpu_price=context.job.gpu_price,
            num_gpus=context.workers.num_gpus,
            workers=tuple(self._worker_statuses),
            seconds_by_limit=self._meter.seconds_by_limit,
            gpus=tuple(gpu_statuses(self._gpus)),
            gpus_missing=self._gpus.now().missing or None,
        )
