"""A job from its first line to its report: the feed, the engine and the writer meet here.

    reader thread:  lines -> prepared batches ──┐
    engine thread:  events of each step ────────┼──> inbox ──> this thread: submit, answer, write
    Ctrl-C:         stop ───────────────────────┘

Memory does not grow with the input: the feed is a few batches ahead, and requests in flight are bounded.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from time import perf_counter
from types import FrameType
from typing import Any, TextIO

import msgspec

from headrace.config import EngineConfig
from headrace.engine.answers import Answers
from headrace.engine.client import Deliver
from headrace.engine.progress import GenerateProgress
from headrace.engine.prompts import PromptReader
from headrace.engine.start import Engine, start_engine
from headrace.errors import EngineDeadError, RequestError
from headrace.jobs.feed import Feed, InputEnded, InputFailed, Prepared
from headrace.jobs.lines import BadLine, LineParser, LineRequest
from headrace.jobs.prepare import LinePreparer, Work
from headrace.jobs.reader import InputLine
from headrace.jobs.reply import ENGINE_ERROR, JobFacts, Reply
from headrace.jobs.report import JobReport, Tally
from headrace.jobs.sources import Sink, Source, open_sink
from headrace.jobs.spec import JobSpec
from headrace.types import Request, SequenceEvent

SPARE_SEQUENCES = 8  # in flight beyond twice what runs, so that the queue of a small engine is never empty
PROGRESS_SECONDS = 0.1
SWITCH_SECONDS = 0.0005


@dataclass(frozen=True, slots=True)
class Stop:
    """The user wants out."""


Message = list[SequenceEvent] | Prepared | InputEnded | InputFailed | Stop
Inbox = SimpleQueue[Message]
Start = Callable[[EngineConfig, Deliver], Engine]


def run_job(
    job: JobSpec, *, start: Start = start_engine, quiet: bool = False, stream: TextIO | None = None
) -> JobReport:
    """Answer every line of the input. When the user stops it, the report says so."""
    job.check_paths()
    stream = stream or sys.stderr
    inbox: Inbox = SimpleQueue()
    with closing(job.open_input()) as source:
        num_expected = _num_expected(job, source)
        _tell(f"loading {job.config.model} ...", quiet, stream)
        engine = start(job.config, inbox.put)
        try:
            _tell(_ready_line(engine, num_expected), quiet, stream)
            with (
                taking_turns(),
                open_sink(job.output, format=job.output_format, overwrite=job.overwrite) as writer,
                GenerateProgress(num_expected, enabled=not quiet, stream=stream) as progress,
                stop_on_interrupt(inbox),
            ):
                lines = source.read_batches(limit=job.limit)
                return JobRun(job, engine, inbox, lines=lines, writer=writer, progress=progress).run()
        finally:
            engine.close()


@contextmanager
def taking_turns() -> Iterator[None]:
    """Threads that read, submit and write are ready to go on more often than Python's 5 ms let them."""
    ordinary = sys.getswitchinterval()
    sys.setswitchinterval(min(ordinary, SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(ordinary)


@contextmanager
def stop_on_interrupt(inbox: Inbox) -> Iterator[None]:
    """The first Ctrl-C asks the job to stop between two lines; the second is an ordinary one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ordinary = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, ordinary)
        inbox.put(Stop())

    signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, ordinary)


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
        writer: Sink,
        progress: GenerateProgress,
    ) -> None:
        self._job = job
        self._engine = engine
        self._inbox = inbox
        self._writer = writer
        self._progress = progress
        self._facts = JobFacts(engine.model_name, engine.tokenizer)
        self._encoder = msgspec.json.Encoder()
        self._tally = Tally()
        self._feed = Feed(lines, _preparer(job, engine), inbox.put)
        self._ready: deque[deque[Work | BadLine]] = deque()
        self._in_flight: dict[str, InFlight] = {}
        self._num_sequences = 0
        self._max_sequences = 2 * engine.settings.max_num_seqs + SPARE_SEQUENCES
        self._has_ended = False
        self._is_stopped = False
        self._started_at = perf_counter()
        self._shown_at = self._started_at

    def run(self) -> JobReport:
        self._feed.start()
        try:
            while not self._is_over:
                self._take(self._inbox.get())
                self._submit_ready()
                self._writer.flush()
                self._show_progress()
        except EngineDeadError as error:
            self._take_last_events()
            raise self._engine_death(error) from error
        finally:
            self._feed.stop()
            for request_id in self._in_flight:
                self._abort(request_id)
        self._progress.update(self._tally.num_done, self._engine.stats, num_failed=self._tally.num_failed)
        return self._report()

    @property
    def _is_over(self) -> bool:
        return self._is_stopped or (self._has_ended and not self._ready and not self._in_flight)

    # What the inbox brings.

    def _take(self, message: Message) -> None:
        match message:
            case []:  # the engine's last word
                raise EngineDeadError(f"the engine has stopped: {self._engine.client.failure}")
            case list():
                self._take_events(message)
            case Prepared(items):
                self._ready.append(deque(items))
            case InputEnded(num_lines):
                self._has_ended = True
                self._progress.expect(num_lines)
            case InputFailed(error):
                raise error
            case Stop():
                self._is_stopped = True

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
        while self._ready and not self._is_stopped:
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
        self._write(line.reply.answer(output, self._facts))
        self._tally.add_answer(line, output)

    def _fail(self, reply: Reply, error: RequestError) -> None:
        self._write(reply.error(error, self._facts))
        self._tally.add_error(reply.index, error)
        self._tally.refuse_too_many_errors(self._job.max_error_rate)

    def _write(self, result: dict[str, Any]) -> None:
        self._writer.append(self._encoder.encode(result))

    # What the user sees.

    def _show_progress(self) -> None:
        now = perf_counter()
        if now - self._shown_at >= PROGRESS_SECONDS or not self._in_flight:
            self._shown_at = now
            self._progress.update(self._tally.num_done, self._engine.stats, num_failed=self._tally.num_failed)

    def _report(self) -> JobReport:
        return JobReport(
            output=self._job.output,
            model_name=self._engine.model_name,
            was_stopped=self._is_stopped,
            num_in_flight=len(self._in_flight),
            tally=self._tally,
            seconds=perf_counter() - self._started_at,
            start_seconds=self._engine.start_seconds,
            stats=self._engine.stats,
            choices=self._engine.settings.choices,
        )

    def _engine_death(self, error: EngineDeadError) -> EngineDeadError:
        return EngineDeadError(
            f"{error}; {self._tally.num_done:,} lines are done and in {self._job.output}, "
            f"{len(self._in_flight):,} were in flight and are lost"
        )


def _preparer(job: JobSpec, engine: Engine) -> LinePreparer:
    parser = LineParser(job.defaults, seed=job.config.seed, model_name=engine.model_name, template=job.template)
    return LinePreparer(parser, PromptReader(engine.tokenizer, engine.spec.vocab_size, engine.grammars))


def _num_expected(job: JobSpec, source: Source) -> int | None:
    num_lines = source.estimate_num_lines()
    return num_lines if num_lines is None or job.limit is None else min(num_lines, job.limit)


def _tell(line: str, quiet: bool, stream: TextIO) -> None:
    if not quiet:
        stream.write(f"headrace: {line}\n")
        stream.flush()


def _ready_line(engine: Engine, num_expected: int | None) -> str:
    settings = engine.settings
    many = "lines as they come" if num_expected is None else f"{num_expected:,} line{'s' if num_expected != 1 else ''}"
    return f"ready in {engine.start_seconds:.1f} s on {settings.device} in {settings.dtype}; answering {many}"
