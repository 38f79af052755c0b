"""Answers the lines of a job: the feed, the planner, the engine and the results meet here.

    reader thread:  lines -> prepared batches ──┐
    engine thread:  events of each step ────────┼──> inbox ──> this thread: submit, answer, write
    Ctrl-C, TERM:   stop ───────────────────────┘

Memory does not grow with the input: the planner holds a window of it, and requests in flight are bounded. What a step
finished is written before anything new is submitted, so that a crash costs no more than what was in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter

import msgspec

from headrace.engine.answers import Answers
from headrace.engine.order import level_of
from headrace.engine.prompts import PromptReader
from headrace.engine.start import Engine
from headrace.errors import EngineDeadError, RequestError
from headrace.jobs.directory import JobDirectory
from headrace.jobs.feed import Feed, InputEnded, InputFailed, Prepared, Preparer
from headrace.jobs.last_checks import LastChecks
from headrace.jobs.lines import BadLine, LineParser
from headrace.jobs.meter import TICK_SECONDS, JobMeter, MeterFacts, saved_by
from headrace.jobs.order import WINDOW, Planner, Window
from headrace.jobs.output import LineOutput, comes_at_once, output_at_end, output_of
from headrace.jobs.prepare import Items, LinePreparer, Work
from headrace.jobs.prepare_process import PreparingProcess, is_worth_a_process
from headrace.jobs.prepare_wire import SentTokenizer, Setup
from headrace.jobs.progress import JobProgress
from headrace.jobs.reader import InputLine
from headrace.jobs.reply import ENGINE_ERROR, JobFacts, Reply
from headrace.jobs.report import JobReport, Tally
from headrace.jobs.spec import JobSpec
from headrace.jobs.status_file import STATUS_NAME, JobState, JobStatus, StatusFile
from headrace.jobs.stopping import Stop
from headrace.jobs.writer import Results
from headrace.types import Request, SequenceEvent

SPARE_SEQUENCES = 8  # in flight beyond twice what runs, so that the queue of a small engine is never empty
CANCEL_SECONDS = 0.5  # how often a job looks whether it was cancelled

Message = list[SequenceEvent] | Prepared | InputEnded | InputFailed | Stop
Inbox = SimpleQueue[Message]


class InFlight(msgspec.Struct, eq=False):
    line: Work
    request: Request
    answers: Answers | None  # None: until its end there is nothing to tell


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
        progress: JobProgress,
        num_expected: int | None = None,
        window: Window = WINDOW,
        directory: JobDirectory | None = None,
        watch: Callable[[JobStatus], None] = lambda status: None,
    ) -> None:
        """`num_expected` lines are left to do. Without a `directory` nothing is done yet, and nothing is kept."""
        self._job = job
        self._engine = engine
        self._inbox = inbox
        self._results = results
        self._directory = directory
        self._num_before = directory.num_before if directory else 0
        self._progress = progress
        self._watch = watch
        self._facts = _facts(engine, directory)
        self._tally = Tally()
        prompts = PromptReader(engine.tokenizer, engine.spec.vocab_size, engine.grammars)
        checks = LastChecks(prompts, seen=None if directory is None else directory.seen_ids)
        local = LinePreparer(_parser(job, engine, directory), prompts)
        self._feed = Feed(lines, _preparer(job, engine, local, num_expected), inbox.put, checks=checks)
        self._planner = Planner(engine.settings.limits, window=window)
        self._num_batches_owed = 0  # that the feed may read once the planner has room
        self._in_flight: dict[str, InFlight] = {}
        self._num_sequences = 0
        self._max_sequences = 2 * engine.settings.max_num_seqs + SPARE_SEQUENCES
        self._has_ended = False
        self._stop: Stop | None = None
        self._leave_at = 0.0  # once it is asked to stop
        self._looked_at = monotonic()
        self._started_at = perf_counter()
        self._num_expected = num_expected
        self._writing_seconds = 0.0
        self._status_file = StatusFile(directory.path / STATUS_NAME if directory else None)
        self._meter = JobMeter(
            MeterFacts(
                output=job.output,
                model=engine.model_name,
                settings=engine.settings,
                start_seconds=engine.start_seconds,
                gpu_price=job.gpu_price,
                num_before=self._num_before,
            )
        )

    def run(self) -> JobReport:
        self._feed.start()
        try:
            while not self._is_over:
                self._take_next()
                self._flush()
                self._submit_ready()
                self._look_for_cancel()
                if self._meter.is_due:
                    self._show("running")
            self._flush()
        except EngineDeadError as error:
            self._take_last_events()
            self._flush()
            raise self._engine_death(error) from error
        finally:
            self._feed.stop()
            for request_id in self._in_flight:
                self._abort(request_id)
            self._show(self._state)
        return self._report()

    @property
    def _is_over(self) -> bool:
        if self._planner.num_held:
            return self._stop is not None and monotonic() >= self._leave_at
        return self._stop is not None or self._has_ended

    @property
    def _state(self) -> JobState:
        """In which it has ended."""
        if not self._is_over:
            return "failed"
        return "finished" if self._stop is None else "stopped"

    # What the inbox brings.

    def _take_next(self) -> None:
        """One message; or none, when it is time to flush, to leave, to look whether the job was cancelled, or to show
        how things stand."""
        limits = [TICK_SECONDS, self._results.seconds_to_flush]
        if self._stop is not None:
            limits.append(self._leave_at - monotonic())
        if self._directory is not None:
            limits.append(CANCEL_SECONDS)
        try:
            message = self._inbox.get(timeout=min(max(0.0, seconds) for seconds in limits if seconds is not None))
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
        self._planner.drop_waiting()

    def _take(self, message: Message) -> None:
        match message:
            case []:  # the engine's last word
                raise EngineDeadError(f"the engine has stopped: {self._engine.client.failure}")
            case list():
                self._take_events(message)
            case Stop():
                self._begin_to_stop(message)
            case _ if self._stop is not None:  # what the feed had still to say
                pass
            case InputFailed(error):
                raise error
            case Prepared(items):
                self._take_prepared(items)
            case InputEnded(num_lines):
                self._has_ended = True
                self._num_expected = num_lines
                self._planner.end_input()
                self._level()

    def _take_events(self, events: list[SequenceEvent]) -> None:
        for event in events:
            entry = self._in_flight.get(event.request_id)
            if entry is None:
                continue
            if entry.answers is None:
                if event.finish_reason is not None and event.error is None:
                    self._finish(entry, output_at_end(entry.request, event, self._engine.tokenizer))
                    continue
                entry.answers = self._answers(entry.request)
            progress = entry.answers.take(event)
            if progress.stopped_index is not None:
                self._abort(event.request_id, progress.stopped_index)
            if progress.is_finished:
                self._finish_answers(entry, entry.answers)

    def _take_last_events(self) -> None:
        """What the engine had finished before it died."""
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, list):
                self._take_events(message)

    # What goes to the engine.

    def _take_prepared(self, items: Items) -> None:
        for item in items:
            if isinstance(item, BadLine):
                self._fail(item.reply, item.error)
            elif (output := self._planner.add(item)) is not None:  # of the same request, earlier
                self._answer(item, output, is_copy=True)
        self._num_batches_owed += 1

    def _submit_ready(self) -> None:
        while self._stop is None and (line := self._planner.peek()) is not None and self._has_room(line):
            self._start(self._planner.take())
        while self._num_batches_owed and self._planner.has_room:
            self._num_batches_owed -= 1
            self._feed.take_more()

    def _has_room(self, line: Work) -> bool:
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

    def _start(self, line: Work) -> None:
        params = line.params
        request = Request(
            str(line.reply.index),
            line.token_ids,
            params,
            cache_salt=line.cache_salt,
            watched=bool(params.stop),
            seed=line.seed,
        )
        try:
            self._engine.client.submit(request)
        except RequestError as error:
            self._fail_all(line, error)
            return
        answers = None if comes_at_once(params) else self._answers(request)
        self._in_flight[request.request_id] = InFlight(line, request, answers)
        self._num_sequences += params.num_sequences

    def _answers(self, request: Request) -> Answers:
        return Answers(request, None, self._engine.tokenizer, self._engine.eos_token_ids)

    def _abort(self, request_id: str, index: int | None = None) -> None:
        if self._engine.client.failure is None:
            self._engine.client.abort(request_id, index)

    # What goes to the output: every line comes here once.

    def _finish_answers(self, entry: InFlight, answers: Answers) -> None:
        if answers.error is None:
            self._finish(entry, output_of(answers.output()))
            return
        self._leave_flight(entry)
        self._abort(entry.request.request_id)  # its other sequences, if any still run
        self._fail_all(entry.line, RequestError(answers.error, code=ENGINE_ERROR))

    def _finish(self, entry: InFlight, output: LineOutput) -> None:
        self._leave_flight(entry)
        self._answer(entry.line, output)
        for follower in self._planner.finished(entry.line.reply.index, output):
            self._answer(follower, output, is_copy=True)

    def _leave_flight(self, entry: InFlight) -> None:
        del self._in_flight[entry.request.request_id]
        self._num_sequences -= entry.request.params.num_sequences

    def _answer(self, line: Work, output: LineOutput, *, is_copy: bool = False) -> None:
        self._results.append(line.reply.index, line.reply.answer(output, self._facts))
        self._tally.add_answer(line, output, is_copy=is_copy)

    def _fail_all(self, line: Work, error: RequestError) -> None:
        """The line, and those of the same request."""
        for each in (line, *self._planner.finished(line.reply.index, None)):
            self._fail(each.reply, error)

    def _fail(self, reply: Reply, error: RequestError) -> None:
        self._results.append(reply.index, reply.error(error, self._facts), error=error.code)
        self._tally.add_error(reply.index, error)
        self._tally.refuse_too_many_errors(self._job.max_error_rate, is_resumable=self._job.is_resumable)

    # What the user sees.

    def _flush(self) -> None:
        started = perf_counter()
        self._results.flush()
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
        if self._directory is not None:
            status = replace(status, **self._directory.marks(self._tally.errors))
        self._progress.update(status)
        self._watch(status)
        if self._directory is None or self._directory.is_ours():
            self._status_file.write(status, now=state != "running")

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
            saved=saved_by(self._engine.stats, self._planner),
            is_on_gpu=self._engine.settings.device == "cuda",
            gpu_price=self._job.gpu_price,
        )

    def _engine_death(self, error: EngineDeadError) -> EngineDeadError:
        place = self._job.output if self._directory is None else f"{self._directory.path}"
        again = "; the same command goes on from there" if self._job.is_resumable else ""
        return EngineDeadError(
            f"{error}; {self._num_before + self._tally.num_done:,} lines are done and in {place}, "
            f"{len(self._in_flight):,} were in flight and are lost{again}"
        )


def _facts(engine: Engine, directory: JobDirectory | None) -> JobFacts:
    """A job keeps its id over all its runs: it is part of the ids of its answers."""
    if directory is None:
        return JobFacts(engine.model_name, engine.tokenizer)
    return JobFacts(engine.model_name, engine.tokenizer, directory.job_id)


def _preparer(job: JobSpec, engine: Engine, local: LinePreparer, num_lines: int | None) -> Preparer:
    """A process of its own for many lines; but rows that are done again are known here only."""
    if job.overrides or not is_worth_a_process(num_lines):
        return local
    return PreparingProcess(
        lambda: Setup(
            defaults=job.defaults,
            seed=job.config.seed,
            model_name=engine.model_name,
            template=job.template,
            vocab_size=engine.spec.vocab_size,
            tokenizer=None if engine.tokenizer is None else SentTokenizer.of(engine.tokenizer),
        ),
        local,
    )


def _parser(job: JobSpec, engine: Engine, directory: JobDirectory | None) -> LineParser:
    return LineParser(
        job.defaults,
        seed=job.config.seed,
        model_name=engine.model_name,
        template=job.template,
        overrides=job.overrides,
        is_redone=directory.redone.__contains__ if directory is not None else lambda index: False,
    )
