"""Runs a job from its command to its report: resume, load the engine, answer all lines that are left, publish."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, TextIO

from headrace.engine.core import EngineStats
from headrace.engine.shares import EngineShare, shares_here
from headrace.engine.start import Engine, start_engine, start_engine_process
from headrace.engine.startup_display import StartupDisplay
from headrace.errors import ConfigError, JobError
from headrace.garbage import collecting_less_often
from headrace.jobs.formats import Source, open_sink
from headrace.jobs.formats.writer import Results, StreamResults
from headrace.jobs.input.prepare_process import MIN_LINES_FOR_PROCESS
from headrace.jobs.recovery.disk_full import retry_on_full_disk
from headrace.jobs.recovery.job_engine import Start
from headrace.jobs.recovery.policy import Progress, RecoveryPolicy
from headrace.jobs.recovery.retry_rules import RetryRules
from headrace.jobs.run.context import RunContext
from headrace.jobs.run.deadline import Deadline, expire_rest, show_expired
from headrace.jobs.run.inbox import Inbox
from headrace.jobs.run.main_loop import MainLoop
from headrace.jobs.run.options import OnBegin, RunOptions
from headrace.jobs.run.signals import sigterm_raises, stop_on_signals
from headrace.jobs.run.stop_state import StopRequest
from headrace.jobs.spec import JobSpec
from headrace.jobs.status.console import Console
from headrace.jobs.status.metrics_server import MetricsServer
from headrace.jobs.status.report import JobReport, Tally
from headrace.jobs.store.directory import JobDirectory
from headrace.jobs.store.failure_log import FailureLog
from headrace.jobs.store.fingerprint import digest_of_template
from headrace.jobs.workers.local import start_in_process, start_workers
from headrace.jobs.workers.worker_set import Workers
from headrace.sched import SchedulerStats
from headrace.startup import Report, StartupStage

if TYPE_CHECKING:
    from headrace.jobs.workers.on_ray.cluster import RayCluster

SWITCH_SECONDS = 0.0005


def run_job(
    job: JobSpec,
    *,
    start: Start | Sequence[Start] | None = None,
    rules: RetryRules | None = None,
    has_own_process: bool = False,
    min_lines_for_process: int = MIN_LINES_FOR_PROCESS,
    quiet: bool = False,
    stream: TextIO | None = None,
    on_begin: OnBegin | None = None,
    cluster: RayCluster | None = None,
    deadline: Deadline | None = None,
) -> JobReport:
    """Answer every line of the input that has no result yet. When the user stops the job, the report says so. `start`
    starts engines, all of them or those of one worker each; by default a single engine runs on a thread, or in a
    process of its own if an earlier run of this job lost its process, and several run in processes. `has_own_process`:
    the engines of `start` run in other processes. From `min_lines_for_process` lines on, a process of its own prepares
    the lines. `on_begin` is called before the first line starts, with a function that stops the run as a signal would,
    from any thread. `cluster`: where the workers run, in place of the one at `job.ray`. `deadline`: of the job,
    for which the caller has read the clock already."""
    job.check_paths()
    console = Console(enabled=not quiet, stream=stream)
    options = RunOptions(
        start=start,
        rules=rules,
        has_own_process=has_own_process,
        min_lines_for_process=min_lines_for_process,
        console=console,
        on_begin=on_begin,
        cluster=cluster,
        deadline=deadline,
    )
    with closing(job.open_input()) as source, MetricsServer(job.metrics_port) as metrics:
        if metrics.url is not None:
            console.tell(f"metrics at {metrics.url}")
        execution = _Execution(job, source, options, metrics)
        if not job.is_durable:
            with open_sink(job.output, format=job.output_format, overwrite=job.overwrite) as sink:
                return execution.answer(StreamResults(sink), None)
        directory = JobDirectory.open(job, source)
        try:
            return execution.run_durable(directory)
        finally:
            directory.close()


@dataclass(frozen=True)
class _Execution:
    """One call of `run_job`."""

    job: JobSpec
    source: Source
    options: RunOptions
    metrics: MetricsServer

    def run_durable(self, directory: JobDirectory) -> JobReport:
        """The output is a file: results go to the job's journal first and are published at the end."""
        if not directory.is_fresh:
            self._tell(_resume_line(directory))
            if not self._has_more(directory):
                return self._publish_finished(directory)
        try:
            report = self._answer_or_expire(directory)
            if not report.was_stopped:
                is_expired = report.was_expired
                self._retry_on_full_disk(lambda: directory.publish("expired" if is_expired else "completed"))
        except BaseException as error:
            _note_failure(directory, error)
            raise
        if report.was_stopped:
            directory.stop("cancelled" if report.was_cancelled else "stopped", "on request")
        return replace(
            report,
            num_before=directory.journal.num_done - report.tally.num_done,
            num_error_lines=directory.journal.num_errors,
            job_directory=str(directory.path),
            is_resumable=self.job.is_resumable and not report.was_cancelled,
        )

    def answer(self, results: Results, directory: JobDirectory | None) -> JobReport:
        """Start engines, here or on a cluster, and run the main loop over the lines that are left."""
        if self.job.ray is None or self.options.cluster is not None:
            return self._answer(results, directory, self.options.cluster)
        from headrace.jobs.workers.on_ray.cluster import connected

        with connected(self.job.ray, tell=self._tell) as cluster:
            return self._answer(results, directory, cluster)

    def _answer(self, results: Results, directory: JobDirectory | None, cluster: RayCluster | None) -> JobReport:
        job, tell = self.job, self._tell
        inbox: Inbox = SimpleQueue()
        num_expected = self._num_expected
        shares = self._shares if cluster is None else cluster.shares(job.config, job.workers)
        recovery = _recovery_of(job, directory, self.options, shares)
        tell(f"loading {job.config.model} ...")
        with sigterm_raises(job), StartupDisplay(tell, terminal=self.options.console.terminal) as display:
            if cluster is None:
                workers = self._start_workers(shares, recovery, display, inbox)
            else:
                workers = _start_on_cluster(cluster, shares, recovery, display, inbox)
        try:
            for warning in workers.engine.settings.warnings:
                tell(f"warning: {warning}")
            _check_price(job, workers.engine)
            num_left = _num_left(num_expected, directory)
            tell(_ready_line(workers, num_left))
            if directory is not None:
                template, begin = _template_of(workers.engine), directory.begin
                self._retry_on_full_disk(lambda: begin(template=template, num_expected=num_expected))
            with (
                fast_thread_switching(),
                self.options.console as console,
                stop_on_signals(inbox.put, lambda: console.write(f"stopping within {job.grace_s:g} s ...")),
            ):
                if self.options.on_begin is not None:
                    self.options.on_begin(lambda: inbox.put(StopRequest()))
                context = RunContext.build(
                    job,
                    results,
                    inbox=inbox,
                    workers=workers,
                    console=console,
                    directory=directory,
                    recovery=recovery,
                    deadline=self._deadline(directory),
                )
                lines = self.source.read_batches(limit=job.limit, skip=None if directory is None else directory.is_done)
                return MainLoop(
                    context,
                    lines if directory is None else directory.checked(lines),
                    num_expected=num_left,
                    min_lines_for_process=self.options.min_lines_for_process,
                    on_status=self.metrics.update,
                ).run()
        finally:
            workers.close()

    def _answer_or_expire(self, directory: JobDirectory) -> JobReport:
        deadline = self._deadline(directory)
        if deadline is not None and deadline.is_over:
            self._retry_on_full_disk(lambda: directory.begin(num_expected=self._num_expected))
            report = replace(report_of_nothing(self.job, directory), was_expired=True)
        else:
            report = self.answer(directory, directory)
        if report.was_expired:
            self._tell("the deadline is over; unfinished lines become error lines")
            expire_rest(self.job, directory, report.tally, flush=lambda: self._retry_on_full_disk(directory.flush))
            self.metrics.update(show_expired(self.job, directory, report.tally))
        return report

    def _deadline(self, directory: JobDirectory | None) -> Deadline | None:
        if self.options.deadline is not None or directory is None or directory.deadline is None:
            return self.options.deadline
        return Deadline(directory.deadline.at)

    def _publish_finished(self, directory: JobDirectory) -> JobReport:
        """Publish the output of a job without lines left, if that was not done yet."""
        if not directory.is_published:
            self._retry_on_full_disk(lambda: directory.begin(num_expected=directory.journal.num_done))
            self._retry_on_full_disk(lambda: directory.publish(directory.state_when_done))
        return report_of_nothing(self.job, directory)

    @property
    def _shares(self) -> list[EngineShare]:
        """Engines of a caller's own `start` are not counted by GPUs."""
        num_workers = self.job.workers or (None if self.options.start is None else 1)
        return shares_here(self.job.config, num_workers)

    def _start_workers(
        self, shares: list[EngineShare], recovery: RecoveryPolicy, report: Report, inbox: Inbox
    ) -> Workers:
        start, num_workers = self.options.start, len(shares)
        own = _needs_own_process(recovery, self.options, num_workers)
        if start is None and num_workers == 1:
            start = partial(start_engine_process if own else start_engine, report=report)
        starts = [start] * num_workers if callable(start) else start
        if starts is None:
            # Only the first one is shown: all of them load the same model.
            starts = [start_in_process(share, ignore if number else report) for number, share in enumerate(shares)]
        configs = [recovery.config_of(number) for number in range(num_workers)]
        workers = start_workers(starts, configs, inbox.put, have_processes=own)
        return Workers(workers, have_processes=own, num_gpus=len({share.gpu for share in shares}))

    def _has_more(self, directory: JobDirectory) -> bool:
        """Whether any line is left. If not, no model has to be loaded."""
        return any(self.source.read_batches(limit=self.job.limit, skip=directory.is_done))

    @property
    def _num_expected(self) -> int | None:
        num_lines, limit = self.source.estimate_num_lines(), self.job.limit
        return num_lines if num_lines is None or limit is None else min(num_lines, limit)

    def _retry_on_full_disk(self, action: Callable[[], None]) -> None:
        """Retry writes outside the main loop."""
        with sigterm_raises(self.job):
            retry_on_full_disk(action, wait_s=self.job.disk_wait_s, tell=self._tell)

    def _tell(self, line: str) -> None:
        self.options.console.tell(line)


def _recovery_of(
    job: JobSpec, directory: JobDirectory | None, options: RunOptions, shares: Sequence[EngineShare]
) -> RecoveryPolicy:
    """Returns the policy in the state that earlier runs left. If the last run was killed and its engine was in the same
    process, the lines that it had in flight are suspects."""
    parts = [(share.config, share.num_sharing) for share in shares]
    if directory is None:
        return RecoveryPolicy(FailureLog(None), job.config, rules=options.rules, shares=parts)
    recovery = RecoveryPolicy(
        directory.failure_log(), job.config, rules=options.rules, is_done=directory.has_result, shares=parts
    )
    if directory.lost_lines:
        journal = directory.journal
        progress = Progress(journal.num_done, journal.num_done - journal.num_errors)
        # By the losses that are known before this one.
        had_own_process = directory.had_engine_processes or _needs_own_process(recovery, options, 1)
        recovery.process_was_lost(directory.epoch - 1, directory.lost_lines, progress, had_own_process=had_own_process)
    return recovery


def _start_on_cluster(
    cluster: RayCluster, shares: list[EngineShare], recovery: RecoveryPolicy, report: Report, inbox: Inbox
) -> Workers:
    configs = [recovery.config_of(number) for number in range(len(shares))]
    workers = cluster.start_workers(shares, configs, inbox.put, report)
    return Workers(workers, have_processes=True, num_gpus=len(shares))


def ignore(stage: StartupStage) -> None:
    """Reports nothing."""


def _needs_own_process(recovery: RecoveryPolicy, options: RunOptions, num_workers: int) -> bool:
    """Whether engines get separate processes."""
    if options.start is not None:
        return options.has_own_process
    return num_workers > 1 or recovery.log.has_lost_process


def _note_failure(directory: JobDirectory, error: BaseException) -> None:
    """Write the failure to the manifest, if that is still possible. The error itself is raised to the user."""
    try:
        directory.stop("stopped", f"{type(error).__name__}: {error}")
    except (JobError, OSError):
        pass


@contextmanager
def fast_thread_switching() -> Iterator[None]:
    """The threads that read, submit and write become ready more often than Python's 5 ms let them run. Garbage is
    collected less often."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(min(interval, SWITCH_SECONDS))
    try:
        with collecting_less_often():
            yield
    finally:
        sys.setswitchinterval(interval)


def report_of_nothing(job: JobSpec, directory: JobDirectory) -> JobReport:
    """Returns the report of a job with no line left, for which no engine was started."""
    return JobReport(
        output=job.output,
        model_name=job.config.model,
        was_stopped=False,
        num_in_flight=0,
        tally=Tally(),
        seconds=0.0,
        start_seconds=0.0,
        stats=EngineStats(SchedulerStats(), 0.0, 0.0),
        choices=(),
        num_before=directory.journal.num_done,
        num_error_lines=directory.journal.num_errors,
        job_directory=str(directory.path),
    )


def _template_of(engine: Engine) -> str | None:
    template = engine.tokenizer.chat_template if engine.tokenizer is not None else None
    return None if template is None else digest_of_template(template.templates)


def _check_price(job: JobSpec, engine: Engine) -> None:
    if job.gpu_price is not None and engine.settings.device != "cuda":
        raise ConfigError(f"--gpu-price is for a GPU, and this job runs on {engine.settings.device}; leave it out")


def _num_left(num_expected: int | None, directory: JobDirectory | None) -> int | None:
    if num_expected is None or directory is None:
        return num_expected
    return max(0, num_expected - directory.num_before)


def _resume_line(directory: JobDirectory) -> str:
    journal = directory.journal
    again = f", {len(directory.redone):,} of them will be computed again" if directory.redone else ""
    damaged = f", {journal.num_damaged:,} damaged lines will be computed again" if journal.num_damaged else ""
    errors = f" (error lines among them: {journal.num_errors:,})" if journal.num_errors else ""
    return f"resuming {directory.path}: {journal.num_done:,} lines are done{errors}{again}{damaged}"


def _ready_line(workers: Workers, num_expected: int | None) -> str:
    settings, num_workers = workers.engine.settings, len(workers)
    side_by_side = f" with {num_workers} workers" if num_workers > 1 else ""
    many = "lines as they come" if num_expected is None else f"{num_expected:,} line{'s' if num_expected != 1 else ''}"
    start = f"ready in {workers.start_seconds:.1f} s on {settings.device} in {settings.dtype}{side_by_side}"
    return f"{start}; answering {many}"
