"""A job from its command to its report: what was done before, the engine, all lines that are left, publishing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TextIO

from headrace.engine.core import EngineStats
from headrace.engine.start import Engine, start_engine, start_engine_process
from headrace.errors import ConfigError, JobError
from headrace.garbage import collecting_less_often
from headrace.jobs.formats import Source, open_sink
from headrace.jobs.formats.writer import Results, StreamResults
from headrace.jobs.input.prepare_process import MIN_LINES_FOR_PROCESS
from headrace.jobs.recovery.disk_full import wait_for_room
from headrace.jobs.recovery.engine_keeper import EngineKeeper, Start
from headrace.jobs.recovery.policy import Progress, Recovery
from headrace.jobs.recovery.retries import RetryRules
from headrace.jobs.run.deadline import Deadline, expire_rest, tell_expired
from headrace.jobs.run.inbox import Inbox
from headrace.jobs.run.job_run import JobRun
from headrace.jobs.run.stopping import stop_on_signals, term_raises
from headrace.jobs.spec import JobSpec
from headrace.jobs.status.metrics_server import MetricsServer
from headrace.jobs.status.progress import JobProgress
from headrace.jobs.status.report import JobReport, Tally
from headrace.jobs.store.directory import JobDirectory
from headrace.jobs.store.failure_log import FailureLog
from headrace.jobs.store.fingerprint import digest_of_template
from headrace.jobs.store.in_flight_file import IN_FLIGHT_NAME, InFlightFile
from headrace.sched import SchedulerStats

SWITCH_SECONDS = 0.0005


def run_job(
    job: JobSpec,
    *,
    start: Start | None = None,
    rules: RetryRules | None = None,
    min_lines_for_process: int = MIN_LINES_FOR_PROCESS,
    quiet: bool = False,
    stream: TextIO | None = None,
) -> JobReport:
    """Answer every line of the input that has no answer yet. When the user stops it, the report says so. The engine is
    on a thread, or in a process of its own if this job has lost its process by it before; or as `start` says. From
    `min_lines_for_process` lines on they are prepared in a process of their own."""
    job.check_paths()
    terms = _Terms(start, rules, min_lines_for_process, _Voice(quiet, stream or sys.stderr))
    with closing(job.open_input()) as source, MetricsServer(job.metrics_port) as metrics:
        if metrics.url is not None:
            terms.voice.tell(f"metrics at {metrics.url}")
        if not job.is_durable:
            with open_sink(job.output, format=job.output_format, overwrite=job.overwrite) as sink:
                return _answer(job, source, StreamResults(sink), None, metrics, terms)
        directory = JobDirectory.open(job, source)
        try:
            return _run_durable(job, source, directory, metrics, terms)
        finally:
            directory.close()


@dataclass(frozen=True)
class _Voice:
    is_quiet: bool
    stream: TextIO

    def tell(self, line: str) -> None:
        if not self.is_quiet:
            self.stream.write(f"headrace: {line}\n")
            self.stream.flush()


@dataclass(frozen=True)
class _Terms:
    """On which a job runs, beside what it is."""

    start: Start | None
    rules: RetryRules | None
    min_lines_for_process: int
    voice: _Voice


def _run_durable(
    job: JobSpec,
    source: Source,
    directory: JobDirectory,
    metrics: MetricsServer,
    terms: _Terms,
) -> JobReport:
    patiently = _Patience(job, terms.voice)
    if not directory.is_fresh:
        terms.voice.tell(_resume_line(directory))
    if not directory.is_fresh and not _has_more(job, source, directory):
        if not directory.is_published:
            patiently(lambda: directory.begin(num_expected=directory.journal.num_done))
            patiently(lambda: directory.publish(directory.state_when_done))
        return report_of_nothing(job, directory)
    try:
        if directory.deadline is not None and Deadline(directory.deadline.at).is_over:
            patiently(lambda: directory.begin(num_expected=_num_expected(job, source)))
            report = replace(report_of_nothing(job, directory), was_expired=True)
        else:
            report = _answer(job, source, directory, directory, metrics, terms)
        if report.was_expired:
            terms.voice.tell("the deadline is over; what is unfinished becomes error lines")
            expire_rest(job, directory, report.tally, flush=lambda: patiently(directory.flush))
            metrics.update(tell_expired(job, directory, report.tally))
        if not report.was_stopped:
            patiently(lambda: directory.publish("expired" if report.was_expired else "completed"))
    except BaseException as error:
        _note_failure(directory, error)
        raise
    if report.was_stopped:
        directory.stop("cancelled" if report.was_cancelled else "stopped", "asked to")
    return replace(
        report,
        num_before=directory.journal.num_done - report.tally.num_done,
        num_error_lines=directory.journal.num_errors,
        job_directory=str(directory.path),
        is_resumable=job.is_resumable and not report.was_cancelled,
    )


def _answer(
    job: JobSpec,
    source: Source,
    results: Results,
    directory: JobDirectory | None,
    metrics: MetricsServer,
    terms: _Terms,
) -> JobReport:
    inbox: Inbox = SimpleQueue()
    num_expected = _num_expected(job, source)
    recovery, start, tell = _recovery(job, directory, terms.rules), terms.start, terms.voice.tell
    if start is None:
        start = start_engine_process if recovery.log.has_lost_process else start_engine
    keeper = EngineKeeper(start, inbox.put)
    tell(f"loading {job.config.model} ...")
    in_flight_file: InFlightFile | None = None
    try:
        with term_raises(job):
            engine = keeper.start(recovery.config)
        _check_price(job, engine)
        num_left = _num_left(num_expected, directory)
        tell(_ready_line(engine, num_left))
        if directory is not None:
            template, begin = _template_of(engine), directory.begin
            _Patience(job, terms.voice)(lambda: begin(template=template, num_expected=num_expected))
            in_flight_file = InFlightFile(directory.path / IN_FLIGHT_NAME, epoch=directory.epoch)
        with (
            taking_turns(),
            JobProgress(enabled=not terms.voice.is_quiet, stream=terms.voice.stream) as progress,
            stop_on_signals(inbox.put, lambda: tell(f"stopping within {job.grace_s:g} s ...")),
        ):
            lines = source.read_batches(limit=job.limit, skip=None if directory is None else directory.is_done)
            run = JobRun(
                job,
                engine,
                inbox,
                lines=lines,
                results=results,
                progress=progress,
                num_expected=num_left,
                directory=directory,
                watch=metrics.update,
                keeper=keeper,
                recovery=recovery,
                in_flight_file=in_flight_file,
                deadline=Deadline(directory.deadline.at) if directory and directory.deadline else None,
                min_lines_for_process=terms.min_lines_for_process,
            )
            del engine  # the run has it, and gives it up when it dies
            return run.run()
    finally:
        keeper.close()
        if in_flight_file is not None:
            in_flight_file.close()


def _recovery(job: JobSpec, directory: JobDirectory | None, rules: RetryRules | None) -> Recovery:
    """As far as earlier runs have brought it. Rows that the last one had in flight, if it was killed, are suspect."""
    if directory is None:
        return Recovery(FailureLog(None), job.config, rules=rules)
    recovery = Recovery(directory.failure_log(), job.config, rules=rules, is_done=directory.has_result)
    if directory.lost_lines:
        journal = directory.journal
        progress = Progress(journal.num_done, journal.num_done - journal.num_errors)
        recovery.process_was_lost(directory.epoch - 1, directory.lost_lines, progress)
    return recovery


class _Patience:
    """For what is written once, while no signal is waited for."""

    def __init__(self, job: JobSpec, voice: _Voice) -> None:
        self._job = job
        self._tell = voice.tell

    def __call__(self, action: Callable[[], None]) -> None:
        with term_raises(self._job):
            wait_for_room(action, wait_s=self._job.disk_wait_s, tell=self._tell)


def _has_more(job: JobSpec, source: Source, directory: JobDirectory) -> bool:
    """Whether any line is left: if not, no model need be loaded."""
    return any(source.read_batches(limit=job.limit, skip=directory.is_done))


def _note_failure(directory: JobDirectory, error: BaseException) -> None:
    """In the manifest, if it can still be written; the error itself is what the user hears."""
    try:
        directory.stop("stopped", f"{type(error).__name__}: {error}")
    except (JobError, OSError):
        pass


@contextmanager
def taking_turns() -> Iterator[None]:
    """Threads that read, submit and write are ready to go on more often than Python's 5 ms let them; and garbage is
    looked for less often."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(min(interval, SWITCH_SECONDS))
    try:
        with collecting_less_often():
            yield
    finally:
        sys.setswitchinterval(interval)


def report_of_nothing(job: JobSpec, directory: JobDirectory) -> JobReport:
    """Of a job that had nothing left to do; no engine was started for it."""
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


def _num_expected(job: JobSpec, source: Source) -> int | None:
    num_lines = source.estimate_num_lines()
    return num_lines if num_lines is None or job.limit is None else min(num_lines, job.limit)


def _num_left(num_expected: int | None, directory: JobDirectory | None) -> int | None:
    if num_expected is None or directory is None:
        return num_expected
    return max(0, num_expected - directory.num_before)


def _resume_line(directory: JobDirectory) -> str:
    journal = directory.journal
    again = f", {len(directory.redone):,} of them are done again" if directory.redone else ""
    damaged = f", {journal.num_damaged:,} damaged lines are done again" if journal.num_damaged else ""
    errors = f" (error lines among them: {journal.num_errors:,})" if journal.num_errors else ""
    return f"going on with {directory.path}: {journal.num_done:,} lines are done{errors}{again}{damaged}"


def _ready_line(engine: Engine, num_expected: int | None) -> str:
    settings = engine.settings
    many = "lines as they come" if num_expected is None else f"{num_expected:,} line{'s' if num_expected != 1 else ''}"
    return f"ready in {engine.start_seconds:.1f} s on {settings.device} in {settings.dtype}; answering {many}"
