"""A job from its first line to its report: the feed, the engine and the writer meet here.

    reader thread:  lines -> prepared batches ──┐
    engine thread:  events of each step ────────┼──> inbox ──> this thread: submit, answer, write
    Ctrl-C:         stop ───────────────────────┘

Memory does not grow with the input: the planner holds a window of it, and requests in flight are bounded.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import perf_counter
from types import FrameType
from typing import Any, TextIO

import msgspec

from headrace.config import EngineConfig
from headrace.engine.answers import Answers
from headrace.engine.client import Deliver
from headrace.engine.order import level_of
from headrace.engine.prompts import PromptReader
from headrace.engine.start import Engine, start_engine
from headrace.errors import ConfigError, EngineDeadError, RequestError
from headrace.jobs.feed import Feed, InputEnded, InputFailed, Prepared
from headrace.jobs.lines import BadLine, LineParser, LineRequest
from headrace.jobs.meter import TICK_SECONDS, JobMeter, MeterFacts, saved_by
from headrace.jobs.order import WINDOW, Planner, Window
from headrace.jobs.prepare import LinePreparer, Work
from headrace.jobs.progress import JobProgress
from headrace.jobs.reader import InputLine
from headrace.jobs.reply import ENGINE_ERROR, JobFacts, Reply
from headrace.jobs.report import JobReport, Tally
from headrace.jobs.sources import Sink, Source, open_sink
from headrace.jobs.spec import JobSpec
from headrace.jobs.status_file import JobState, StatusFile, status_path
from headrace.types import Request, RequestOutput, SequenceEvent

SPARE_SEQUENCES = 8  # in flight beyond twice what runs, so that the queue of a small engine is never empty
SWITCH_SECONDS = 0.0005
GARBAGE_OBJECTS = 50_000


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
            _check_price(job, engine)
            _tell(_ready_line(engine, num_expected), quiet, stream)
            with (
                taking_turns(),
                open_sink(job.output, format=job.output_format, overwrite=job.overwrite) as writer,
                JobProgress(enabled=not quiet, stream=stream) as progress,
                stop_on_interrupt(inbox),
            ):
                lines = source.read_batches(limit=job.limit)
                run = JobRun(
                    job, engine, inbox, lines=lines, writer=writer, progress=progress, num_expected=num_expected
                )
                return run.run()
        finally:
            engine.close()


@contextmanager
def taking_turns() -> Iterator[None]:
    """Threads that read, submit and write are ready to go on more often than Python's 5 ms let them; and garbage is
    looked for less often, as a line leaves no cycles behind."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(min(interval, SWITCH_SECONDS))
    gc.set_threshold(GARBAGE_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)


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
        progress: JobProgress,
        num_expected: int | None = None,
        window: Window = WINDOW,
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
        self._planner = Planner(engine.settings.limits, job_seed=job.config.seed, window=window)
        self._num_batches_owed = 0  # that the feed may read once the planner has room
        self._in_flight: dict[str, InFlight] = {}
        self._num_sequences = 0
        self._max_sequences = 2 * engine.settings.max_num_seqs + SPARE_SEQUENCES
        self._has_ended = False
        self._is_stopped = False
        self._started_at = perf_counter()
        self._num_expected = num_expected
        self._writing_seconds = 0.0
        self._status_file = StatusFile(status_path(job.output))
        self._meter = JobMeter(
            MeterFacts(
                output=job.output,
                model=engine.model_name,
                settings=engine.settings,
                start_seconds=engine.start_seconds,
                gpu_price=job.gpu_price,
            )
        )

    def run(self) -> JobReport:
        self._feed.start()
        try:
            while not self._is_over:
                self._take_next()
                self._submit_ready()
                self._flush()
                if self._meter.is_due:
                    self._show("running")
        except EngineDeadError as error:
            self._take_last_events()
            raise self._engine_death(error) from error
        finally:
            self._feed.stop()
            for request_id in self._in_flight:
                self._abort(request_id)
            self._show(self._state)
        return self._report()

    @property
    def _is_over(self) -> bool:
        return self._is_stopped or (self._has_ended and not self._planner.num_held)

    @property
    def _state(self) -> JobState:
        """In which it has ended."""
        return "stopped" if self._is_stopped else "finished" if self._is_over else "failed"

    # What the inbox brings.

    def _take_next(self) -> None:
        try:
            self._take(self._inbox.get(timeout=TICK_SECONDS))
        except Empty:  # time to show how things stand
            pass

    def _take(self, message: Message) -> None:
        match message:
            case []:  # the engine's last word
                raise EngineDeadError(f"the engine has stopped: {self._engine.client.failure}")
            case list():
                self._take_events(message)
            case Prepared(items):
                self._take_prepared(items)
            case InputEnded(num_lines):
                self._has_ended = True
                self._num_expected = num_lines
                self._planner.end_input()
                self._level()
            case InputFailed(error):
                raise error
            case Stop():
                self._is_stopped = True
                self._planner.drop_waiting()

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

    def _take_prepared(self, items: list[Work | BadLine]) -> None:
        for item in items:
            if isinstance(item, BadLine):
                self._fail(item.reply, item.error)
            elif (output := self._planner.add(item)) is not None:  # of the same request, earlier
                self._answer(item.request, output, is_copy=True)
        self._num_batches_owed += 1

    def _submit_ready(self) -> None:
        while not self._is_stopped and (line := self._planner.peek()) is not None and self._has_room(line):
            self._start(self._planner.take())
        while self._num_batches_owed and self._planner.has_room:
            self._num_batches_owed -= 1
            self._feed.take_more()

    def _has_room(self, line: LineRequest) -> bool:
        return self._planner.may_start(
            line.params.num_sequences, num_in_flight=self._num_sequences, max_in_flight=self._max_sequences
        )

    def _level(self) -> None:
        """All that is left is known: run no more at once than keeps the device busy until the longest answer ends."""
        left = self._planner.left()
        longest = max(left.longest_waiting, left.longest_running)
        num_tokens = left.num_decode_tokens + left.num_running_decode_tokens
        if (num_seqs := level_of(round(num_tokens), round(longest), self._engine.settings)) is not None:
            self._engine.client.limit_running(num_seqs)

    def _start(self, item: Work) -> None:
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
            self._fail_all(line, error)
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
            self._fail_all(line, RequestError(answers.error, code=ENGINE_ERROR))
            return
        output = answers.output()
        self._answer(line, output)
        for follower in self._planner.finished(line.reply.index, output):
            self._answer(follower, output, is_copy=True)

    def _answer(self, line: LineRequest, output: RequestOutput, *, is_copy: bool = False) -> None:
        self._write(line.reply.answer(output, self._facts))
        self._tally.add_answer(line, output, is_copy=is_copy)

    def _fail_all(self, line: LineRequest, error: RequestError) -> None:
        """The line, and those of the same request."""
        for each in (line, *self._planner.finished(line.reply.index, None)):
            self._fail(each.reply, error)

    def _fail(self, reply: Reply, error: RequestError) -> None:
        self._write(reply.error(error, self._facts))
        self._tally.add_error(reply.index, error)
        self._tally.refuse_too_many_errors(self._job.max_error_rate)

    def _write(self, result: dict[str, Any]) -> None:
        self._writer.append(self._encoder.encode(result))

    # What the user sees.

    def _flush(self) -> None:
        started = perf_counter()
        self._writer.flush()
        self._writing_seconds += perf_counter() - started

    def _show(self, state: JobState) -> None:
        status = self._meter.look(
            self._engine.stats,
            self._tally,
            self._planner,
            num_total=self._num_expected,
            num_in_flight=len(self._in_flight),
            has_ended=self._has_ended,
            writing_seconds=self._writing_seconds,
            state=state,
        )
        self._progress.update(status)
        self._status_file.write(status, now=state != "running")

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
            saved=saved_by(self._engine.stats, self._planner),
            is_on_gpu=self._engine.settings.device == "cuda",
            gpu_price=self._job.gpu_price,
        )

    def _engine_death(self, error: EngineDeadError) -> EngineDeadError:
        return EngineDeadError(
            f"{error}; {self._tally.num_done:,} lines are done and in {self._job.output}, "
            f"{len(self._in_flight):,} were in flight and are lost"
        )


def _preparer(job: JobSpec, engine: Engine) -> LinePreparer:
    parser = LineParser(job.defaults, seed=job.config.seed, model_name=engine.model_name, template=job.template)
    return LinePreparer(parser, PromptReader(engine.tokenizer, engine.spec.vocab_size, engine.grammars))


def _check_price(job: JobSpec, engine: Engine) -> None:
    if job.gpu_price is not None and engine.settings.device != "cuda":
        raise ConfigError(f"--gpu-price is for a GPU, and this job runs on {engine.settings.device}; leave it out")


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
