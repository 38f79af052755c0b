"""A job from its first line to its report: the feed, the engine and the writer meet here.

    reader thread:  lines -> prepared batches ──┐
    engine thread:  events of each step ────────┼──> inbox ──> this thread: submit, answer, write
    Ctrl-C, TERM:   stop ───────────────────────┘

Memory does not grow with the input: the feed is a few batches ahead, and requests in flight are bounded. What a step
finished is written before anything new is submitted, so that a crash costs no more than what was in flight.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter
from types import FrameType
from typing import Any, TextIO

import msgspec

from headrace.config import EngineConfig
from headrace.engine.answers import Answers
from headrace.engine.client import Deliver
from headrace.engine.core import EngineStats
from headrace.engine.progress import GenerateProgress
from headrace.engine.prompts import PromptReader
from headrace.engine.start import Engine, start_engine
from headrace.errors import EngineDeadError, JobError, RequestError, ResumableJobError
from headrace.jobs.directory import JobDirectory
from headrace.jobs.feed import Feed, InputEnded, InputFailed, Prepared
from headrace.jobs.fingerprint import digest_of_template
from headrace.jobs.lines import BadLine, LineParser, LineRequest
from headrace.jobs.prepare import LinePreparer, Work
from headrace.jobs.reader import InputLine, estimate_num_lines, open_input, read_batches
from headrace.jobs.reply import ENGINE_ERROR, JobFacts, Reply
from headrace.jobs.report import JobReport, Tally
from headrace.jobs.spec import JobSpec
from headrace.jobs.writer import Results, ResultWriter
from headrace.sched import SchedulerStats
from headrace.types import Request, SequenceEvent

SPARE_SEQUENCES = 8  # in flight beyond twice what runs, so that the queue of a small engine is never empty
PROGRESS_SECONDS = 0.1


CANCEL_SECONDS = 0.5  # how often a job looks whether it was cancelled


@dataclass(frozen=True, slots=True)
class Stop:
    """The user wants out."""

    is_cancelled: bool = False


Message = list[SequenceEvent] | Prepared | InputEnded | InputFailed | Stop
Inbox = SimpleQueue[Message]
Start = Callable[[EngineConfig, Deliver], Engine]


def run_job(
    job: JobSpec, *, start: Start = start_engine, quiet: bool = False, stream: TextIO | None = None
) -> JobReport:
    """Answer every line of the input that has no answer yet. When the user stops it, the report says so."""
    job.check_paths()
    stream = stream or sys.stderr
    if not job.is_durable:
        with ResultWriter.open(job.output) as writer:
            return _answer(job, writer, None, start, quiet=quiet, stream=stream)
    directory = JobDirectory.open(job)
    try:
        return _run_durable(job, directory, start, quiet=quiet, stream=stream)
    finally:
        directory.close()


def _run_durable(job: JobSpec, directory: JobDirectory, start: Start, *, quiet: bool, stream: TextIO) -> JobReport:
    if not directory.is_fresh:
        _tell(_resume_line(directory), quiet, stream)
    if not directory.is_fresh and not _has_more(job, directory):
        if not directory.is_published:
            directory.begin(num_expected=directory.journal.num_done)
            directory.publish()
        return report_of_nothing(job, directory)
    try:
        report = _answer(job, directory, directory, start, quiet=quiet, stream=stream)
        if not report.was_stopped:
            directory.publish()
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
    job: JobSpec, results: Results, directory: JobDirectory | None, start: Start, *, quiet: bool, stream: TextIO
) -> JobReport:
    inbox: Inbox = SimpleQueue()
    with open_input(job.input) as source:
        num_expected = _num_expected(job)
        _tell(f"loading {job.config.model} ...", quiet, stream)
        with term_raises(job):
            engine = start(job.config, inbox.put)
        try:
            num_left = _num_left(num_expected, directory)
            _tell(_ready_line(engine, num_left), quiet, stream)
            if directory is not None:
                directory.begin(template=_template_of(engine), num_expected=num_expected)
            with (
                GenerateProgress(num_left, enabled=not quiet, stream=stream) as progress,
                stop_on_signals(inbox, lambda: _tell(f"stopping within {job.grace_s:g} s ...", quiet, stream)),
            ):
                lines = read_batches(source, limit=job.limit)
                run = JobRun(job, engine, inbox, lines=lines, results=results, progress=progress, directory=directory)
                return run.run()
        finally:
            engine.close()


def _has_more(job: JobSpec, directory: JobDirectory) -> bool:
    """Whether any line is left: if not, no model need be loaded."""
    with open_input(job.input) as source:
        return any(
            not directory.is_done(line.index) for batch in read_batches(source, limit=job.limit) for line in batch
        )


def _note_failure(directory: JobDirectory, error: BaseException) -> None:
    """In the manifest, if it can still be written; the error itself is what the user hears."""
    try:
        directory.stop("stopped", f"{type(error).__name__}: {error}")
    except (JobError, OSError):
        pass


@contextmanager
def term_raises(job: JobSpec) -> Iterator[None]:
    """While the model is loaded there is nothing to bring to an end: a SIGTERM is an error that can be resumed."""
    if threading.current_thread() is not threading.main_thread() or not job.is_resumable:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise ResumableJobError("stopped by SIGTERM while the model was loaded; the same command goes on from there")

    ordinary = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, ordinary)


@contextmanager
def stop_on_signals(inbox: Inbox, tell: Callable[[], None]) -> Iterator[None]:
    """The first SIGINT (Ctrl-C) or SIGTERM asks the job to come to an end; the second is an ordinary one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ordinary = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in ordinary.items():
            signal.signal(number, handler)

    def ask(number: int, frame: FrameType | None) -> None:
        restore()
        inbox.put(Stop())
        tell()

    for number in ordinary:
        signal.signal(number, ask)
    try:
        yield
    finally:
        restore()


@dataclass(frozen=True, slots=True)
class InFlight:
    line: LineRequest
    answers: Answers


class JobRun:
    """Owns what is in flight. Everything happens on the thread that calls `run`, one message at a time."""

    def __init__(
        self,
        job: JobSpec,
        engine: Engine,
        inbox: Inbox,
        *,
        lines: Iterable[list[InputLine]],
        results: Results,
        progress: GenerateProgress,
        directory: JobDirectory | None = None,
    ) -> None:
        """Without a `directory` nothing is done yet, and nothing is kept."""
        self._job = job
        self._engine = engine
        self._inbox = inbox
        self._results = results
        self._directory = directory
        self._num_before = directory.num_before if directory else 0
        self._progress = progress
        self._facts = _facts(engine, directory)
        self._encoder = msgspec.json.Encoder()
        self._tally = Tally()
        self._feed = Feed(lines, _preparer(job, engine, directory), inbox.put)
        self._ready: deque[deque[Work | BadLine]] = deque()
        self._in_flight: dict[str, InFlight] = {}
        self._num_sequences = 0
        self._max_sequences = 2 * engine.settings.max_num_seqs + SPARE_SEQUENCES
        self._has_ended = False
        self._stop: Stop | None = None
        self._leave_at = 0.0  # once it is asked to stop
        self._looked_at = monotonic()
        self._started_at = perf_counter()
        self._shown_at = self._started_at

    def run(self) -> JobReport:
        self._feed.start()
        try:
            while not self._is_over:
                self._take_next()
                self._results.flush()
                self._submit_ready()
                self._look_for_cancel()
                self._show_progress()
            self._results.flush()
        except EngineDeadError as error:
            self._take_last_events()
            self._results.flush()
            raise self._engine_death(error) from error
        finally:
            self._feed.stop()
            for request_id in self._in_flight:
                self._abort(request_id)
        self._update_progress()
        return self._report()

    @property
    def _is_over(self) -> bool:
        if self._stop is not None:
            return not self._in_flight or monotonic() >= self._leave_at
        return self._has_ended and not self._ready and not self._in_flight

    # What the inbox brings.

    def _take_next(self) -> None:
        """One message; or none, when it is time to flush, to leave, or to look whether the job was cancelled."""
        limits = [self._results.seconds_to_flush]
        if self._stop is not None:
            limits.append(self._leave_at - monotonic())
        if self._directory is not None:
            limits.append(CANCEL_SECONDS)
        try:
            message = self._inbox.get(timeout=min((max(0.0, s) for s in limits if s is not None), default=None))
        except Empty:
            return
        self._take(message)

    def _look_for_cancel(self) -> None:
        if self._directory is None or self._stop is not None or monotonic() - self._looked_at < CANCEL_SECONDS:
            return
        self._looked_at = monotonic()
        if self._directory.is_cancelled:
            self._begin_to_stop(Stop(is_cancelled=True))

    def _begin_to_stop(self, stop: Stop) -> None:
        """Nothing new is started; what is in flight has until the grace is over."""
        self._stop = stop
        self._leave_at = monotonic() + self._job.grace_s
        self._feed.stop()
        self._ready.clear()

    def _take(self, message: Message) -> None:
        match message:
            case []:  # the engine's last word
                raise EngineDeadError(f"the engine has stopped: {self._engine.client.failure}")
            case list():
                self._take_events(message)
            case Prepared(items):
                if self._stop is None:
                    self._ready.append(deque(items))
            case InputEnded(num_lines):
                self._has_ended = True
                self._progress.expect(max(0, num_lines - self._num_before))
            case InputFailed(error):
                raise error
            case Stop():
                self._begin_to_stop(message)

    def _take_events(self, events: list[SequenceEvent]) -> None:
        for event in events:
            entry = self._in_flight.get(event.request_id)
            if entry is None:
                continue
            progress = entry.answers.take(event)
            if progress.stopped_index is not None:
                self._abort(event.request_id, progress.stopped_index)
            if progress.is_finished:
                self._finish(entry)

    def _take_last_events(self) -> None:
        """What the engine had finished before it died."""
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, list):
                self._take_events(message)

    # What goes to the engine.

    def _submit_ready(self) -> None:
        while self._ready:
            batch = self._ready[0]
            while batch:
                if not self._has_room(batch[0]):
                    return
                self._start(batch.popleft())
            self._ready.popleft()
            self._feed.take_more()

    def _has_room(self, item: Work | BadLine) -> bool:
        if isinstance(item, BadLine) or not self._in_flight:
            return True
        return self._num_sequences + item.request.params.num_sequences <= self._max_sequences

    def _start(self, item: Work | BadLine) -> None:
        if isinstance(item, BadLine):
            self._fail(item.reply, item.error)
            return
        line = item.request
        request = Request(
            str(line.reply.index),
            item.prompt.token_ids,
            line.params,
            cache_salt=line.cache_salt,
            watched=bool(line.params.stop),
        )
        try:
            self._engine.client.submit(request)
        except RequestError as error:
            self._fail(line.reply, error)
            return
        answers = Answers(request, None, self._engine.tokenizer, self._engine.eos_token_ids)
        self._in_flight[request.request_id] = InFlight(line, answers)
        self._num_sequences += line.params.num_sequences

    def _abort(self, request_id: str, index: int | None = None) -> None:
        if self._engine.client.failure is None:
            self._engine.client.abort(request_id, index)

    # What goes to the output: every line comes here once.

    def _finish(self, entry: InFlight) -> None:
        line, answers = entry.line, entry.answers
        del self._in_flight[answers.request.request_id]
        self._num_sequences -= line.params.num_sequences
        if answers.error is not None:
            self._abort(answers.request.request_id)  # its other sequences, if any still run
            self._fail(line.reply, RequestError(answers.error, code=ENGINE_ERROR))
            return
        output = answers.output()
        self._write(line.reply.index, line.reply.answer(output, self._facts))
        self._tally.add_answer(line, output)

    def _fail(self, reply: Reply, error: RequestError) -> None:
        self._write(reply.index, reply.error(error, self._facts), error=error.code)
        self._tally.add_error(reply.index, error)

    def _write(self, index: int, result: dict[str, Any], *, error: str | None = None) -> None:
        self._results.append(index, self._encoder.encode(result), error=error)

    # What the user sees.

    def _show_progress(self) -> None:
        now = perf_counter()
        if now - self._shown_at >= PROGRESS_SECONDS or not self._in_flight:
            self._shown_at = now
            self._update_progress()

    def _update_progress(self) -> None:
        self._progress.update(self._tally.num_done, self._engine.stats, num_failed=self._tally.num_failed)

    def _report(self) -> JobReport:
        return JobReport(
            output=self._job.output,
            model_name=self._engine.model_name,
            was_stopped=self._stop is not None,
            was_cancelled=self._stop is not None and self._stop.is_cancelled,
            num_in_flight=len(self._in_flight),
            tally=self._tally,
            seconds=perf_counter() - self._started_at,
            start_seconds=self._engine.start_seconds,
            stats=self._engine.stats,
            choices=self._engine.settings.choices,
        )

    def _engine_death(self, error: EngineDeadError) -> EngineDeadError:
        place = self._job.output if self._directory is None else f"{self._directory.path}"
        again = "; the same command goes on from there" if self._job.is_resumable else ""
        return EngineDeadError(
            f"{error}; {self._num_before + self._tally.num_done:,} lines are done and in {place}, "
            f"{len(self._in_flight):,} were in flight and are lost{again}"
        )


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


def _facts(engine: Engine, directory: JobDirectory | None) -> JobFacts:
    """A job keeps its id over all its runs: it is part of the ids of its answers."""
    if directory is None:
        return JobFacts(engine.model_name, engine.tokenizer)
    return JobFacts(engine.model_name, engine.tokenizer, directory.job_id)


def _preparer(job: JobSpec, engine: Engine, directory: JobDirectory | None) -> LinePreparer:
    prompts = PromptReader(engine.tokenizer, engine.spec.vocab_size)
    if directory is None:
        return LinePreparer(LineParser(job.defaults, seed=job.config.seed, model_name=engine.model_name), prompts)
    parser = LineParser(
        job.defaults,
        seed=job.config.seed,
        model_name=engine.model_name,
        overrides=job.overrides,
        is_redone=directory.redone.__contains__,
    )
    return LinePreparer(parser, prompts, is_done=directory.is_done)


def _template_of(engine: Engine) -> str | None:
    template = engine.tokenizer.chat_template if engine.tokenizer is not None else None
    return None if template is None else digest_of_template(template.templates)


def _num_expected(job: JobSpec) -> int | None:
    num_lines = estimate_num_lines(job.input)
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


def _tell(line: str, quiet: bool, stream: TextIO) -> None:
    if not quiet:
        stream.write(f"headrace: {line}\n")
        stream.flush()


def _ready_line(engine: Engine, num_expected: int | None) -> str:
    settings = engine.settings
    many = "lines as they come" if num_expected is None else f"{num_expected:,} line{'s' if num_expected != 1 else ''}"
    return f"ready in {engine.start_seconds:.1f} s on {settings.device} in {settings.dtype}; answering {many}"
