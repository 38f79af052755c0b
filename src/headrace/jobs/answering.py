"""Answers the lines of a job: the feed, the planner, the engine and the results meet here.

    reader thread:  lines -> prepared batches ──┐
    engine thread:  events of each step ────────┼──> inbox ──> this thread: submit, answer, write
    Ctrl-C, TERM:   stop ───────────────────────┘

Memory does not grow with the input: the planner holds a window of it, and requests in flight are bounded. What a step
finished is written before anything new is submitted, so that a crash costs no more than what was in flight. When the
engine dies, what was in flight waits (`jobs/retries`) until there is another, as `jobs/recovery` says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter
from typing import Any

import msgspec

from headrace.engine.answers import Answers
from headrace.engine.core import EngineStats
from headrace.engine.order import level_of
from headrace.engine.process import EngineProcess
from headrace.engine.prompts import PromptReader
from headrace.engine.start import Engine
from headrace.errors import EngineDeadError, JobError, RequestError, ResumableJobError
from headrace.jobs.deadline import Deadline
from headrace.jobs.directory import JobDirectory
from headrace.jobs.disk_full import DiskWait
from headrace.jobs.engine_keeper import EngineKeeper, GoneClient, joined
from headrace.jobs.feed import Feed, InputEnded, InputFailed, Prepared
from headrace.jobs.in_flight_file import InFlightFile
from headrace.jobs.lines import BadLine, LineParser, LineRequest
from headrace.jobs.meter import TICK_SECONDS, JobMeter, MeterFacts, saved_by
from headrace.jobs.order import WINDOW, Planner, Window
from headrace.jobs.prepare import LinePreparer, Work
from headrace.jobs.progress import JobProgress
from headrace.jobs.reader import InputLine
from headrace.jobs.recovery import Progress, Recovery, Restart
from headrace.jobs.reply import ENGINE_ERROR, JobFacts, Reply
from headrace.jobs.report import JobReport, Tally
from headrace.jobs.retries import Waiting
from headrace.jobs.spec import JobSpec
from headrace.jobs.status_file import STATUS_NAME, JobState, StatusFile
from headrace.jobs.stopping import Stop
from headrace.jobs.trouble import TroubleLog
from headrace.jobs.writer import Results
from headrace.types import Request, RequestOutput, SequenceEvent

SPARE_SEQUENCES = 8  # in flight beyond twice what runs, so that the queue of a small engine is never empty
CANCEL_SECONDS = 0.5  # how often a job looks whether it was cancelled

Message = list[SequenceEvent] | Prepared | InputEnded | InputFailed | Stop
Inbox = SimpleQueue[Message]


@dataclass(frozen=True, slots=True)
class InFlight:
    work: Work
    answers: Answers

    @property
    def line(self) -> LineRequest:
        return self.work.request


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
        keeper: EngineKeeper | None = None,
        recovery: Recovery | None = None,
        in_flight_file: InFlightFile | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        """`num_expected` lines are left to do. Without a `directory` nothing is done yet, and nothing is kept; without
        a `keeper` of the engine its death is the end."""
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
        self._planner = Planner(engine.settings.limits, job_seed=job.config.seed, window=window)
        self._num_batches_owed = 0  # that the feed may read once the planner has room
        self._deadline = deadline
        self._keeper = keeper
        self._recovery = recovery or Recovery(TroubleLog(None), job.config)
        self._in_flight_file = in_flight_file or InFlightFile(None)
        self._again = Waiting()
        self._disk = DiskWait(job.disk_wait_s, directory=directory.path if directory else None, tell=progress.tell)
        self._kept: deque[Message] = deque()  # taken out of the inbox, and still to be looked at
        self._stats_before: EngineStats | None = None  # of the engines that have died
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
                death = self._turn()
                if death is not None:
                    self._recover(death)
            self._flush()
        finally:
            self._feed.stop()
            for request_id in self._in_flight:
                self._abort(request_id)
            self._in_flight_file.clear()
            self._show(self._state)
        return self._report()

    def _turn(self) -> EngineDeadError | None:
        """What is returned holds nothing of the engine that has died."""
        try:
            self._take_next()
            self._flush()
            self._submit_ready()
            self._look_for_end()
            if self._meter.is_due:
                self._show("running")
        except EngineDeadError as error:
            return error.with_traceback(None)
        return None

    @property
    def _is_over(self) -> bool:
        if self._stop is not None:
            return not self._in_flight or monotonic() >= self._leave_at
        return self._has_ended and not self._planner.num_held and not self._in_flight and not self._again

    @property
    def _state(self) -> JobState:
        """In which it has ended."""
        if not self._is_over:
            return "failed"
        if self._stop is not None:
            return "expired" if self._stop.is_expired else "stopped"
        return "finished"

    # What the inbox brings.

    def _take_next(self, at_most_s: float | None = None) -> None:
        """One message; or none, when it is time to flush, to leave, to look whether the job was cancelled, to try
        something again, or to show how things stand."""
        if self._kept:
            self._take(self._kept.popleft())
            return
        to_flush_s = self._disk.seconds_to_try if self._disk.is_full else self._results.seconds_to_flush
        limits = [TICK_SECONDS, to_flush_s, self._again.seconds_to_next, at_most_s]
        if self._stop is not None:
            limits.append(self._leave_at - monotonic())
        if self._directory is not None:
            limits.append(CANCEL_SECONDS)
        if self._deadline is not None:
            limits.append(self._deadline.seconds_left)
        try:
            message = self._inbox.get(timeout=min(max(0.0, seconds) for seconds in limits if seconds is not None))
        except Empty:
            return
        self._take(message)

    def _look_for_end(self) -> None:
        if self._deadline is not None and self._stop is None and self._deadline.is_over and not self._is_over:
            self._begin_to_stop(Stop(is_expired=True))
            self._leave_at = monotonic()
        self._look_for_cancel()

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
            progress = entry.answers.take(event)
            if progress.stopped_index is not None:
                self._abort(event.request_id, progress.stopped_index)
            if progress.is_finished:
                self._finish(entry)

    def _take_last_events(self) -> None:
        """What the engine had finished before it died. The messages of others stay in their order."""
        self._kept.extend(self._inbox.get() for _ in range(self._inbox.qsize()))
        events = [message for message in self._kept if isinstance(message, list)]
        self._kept = deque(message for message in self._kept if not isinstance(message, list))
        for message in events:
            self._take_events(message)

    # What goes to the engine.

    def _take_prepared(self, items: list[Work | BadLine]) -> None:
        suspects, convicted = self._recovery.suspects, self._recovery.convicted
        is_searching = suspects.trial is not None
        for item in items:
            if isinstance(item, BadLine):
                self._fail(item.reply, item.error)
            elif convicted and item.request.reply.index in convicted:
                self._fail(item.request.reply, self._recovery.poison_error())
            elif is_searching and item.request.reply.index in suspects:
                self._again.put(item)
            elif (output := self._planner.add(item)) is not None:  # of the same request, earlier
                self._answer(item.request, output, is_copy=True)
        self._num_batches_owed += 1

    def _submit_ready(self) -> None:
        if self._disk.is_full:
            return
        works = [] if self._stop is not None else self._choose()
        if works:
            self._in_flight_file.add([work.request.reply.index for work in works])
            self._start_all(works)
        while self._num_batches_owed and self._planner.has_room:
            self._num_batches_owed -= 1
            self._feed.take_more()

    def _choose(self) -> list[Work]:
        """What goes to the engine now: what waits to be done again, then as the planner says; suspects alone."""
        trial = self._recovery.suspects.trial
        if trial is not None:
            self._forget_missing(trial)
            trial = self._recovery.suspects.trial
        chosen: list[Work] = []
        num_sequences = self._num_sequences
        for work in self._again.due(trial) if self._again else ():
            if num_sequences and num_sequences + work.request.params.num_sequences > self._max_sequences:
                return chosen
            chosen.append(self._again.remove(work.request.reply.index))
            num_sequences += work.request.params.num_sequences
        while trial is None and (line := self._planner.peek()) is not None:
            num_more = line.params.num_sequences
            if not self._planner.may_start(num_more, num_in_flight=num_sequences, max_in_flight=self._max_sequences):
                break
            chosen.append(self._planner.take())
            num_sequences += num_more
        return chosen

    def _start_all(self, works: list[Work]) -> None:
        for place, work in enumerate(works):
            try:
                self._start(work)
            except EngineDeadError:
                for rest in works[place:]:
                    self._again.put(rest)
                raise

    def _forget_missing(self, trial: frozenset[int]) -> None:
        """Suspects of an earlier run that the input does not have any more, or only far behind, are waited for no
        longer than there is room to read."""
        if not self._has_ended and self._planner.has_room:
            return
        missing = [row for row in trial if row not in self._again and str(row) not in self._in_flight]
        if missing:
            self._recovery.suspects.forget(missing)

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
        self._in_flight[request.request_id] = InFlight(item, answers)
        self._num_sequences += line.params.num_sequences

    def _abort(self, request_id: str, index: int | None = None) -> None:
        if self._engine.client.failure is None:
            try:
                self._engine.client.abort(request_id, index)
            except EngineDeadError:
                pass  # it ended with its engine, whose last word is on its way

    # When the engine has died.

    def _recover(self, death: EngineDeadError) -> None:
        failure = self._engine.client.failure or death
        if self._keeper is None:
            self._take_last_events()
            self._flush()
            raise self._engine_death(death)
        settings, is_apart = self._engine.settings, isinstance(self._engine.client, EngineProcess)
        self._stats_before = self._stats
        self._engine = replace(self._engine, client=GoneClient(failure))
        self._keeper.close()
        self._take_last_events()
        self._flush()
        if self._stop is not None:
            self._leave_at = monotonic()
            return
        rows = [entry.line.reply.index for entry in self._in_flight.values()]
        try:
            restart = self._recovery.engine_died(failure, rows, self._done_so_far, settings, is_apart=is_apart)
            self._requeue()
            self._restart(restart)
        except ResumableJobError as error:
            if self._job.is_resumable:
                raise
            raise JobError(f"{error} (but not this job: its input or output is a stream)") from error

    @property
    def _done_so_far(self) -> Progress:
        if self._directory is None:
            return Progress(self._tally.num_done, self._tally.num_answered)
        journal = self._directory.journal
        return Progress(journal.num_done, journal.num_done - journal.num_errors)

    def _requeue(self) -> None:
        """What was in flight is done again, but for a row that is to blame."""
        for entry in self._in_flight.values():
            self._again.put(entry.work)
        self._in_flight.clear()
        self._num_sequences = 0
        self._in_flight_file.clear()
        for row in [row for row in self._recovery.convicted if row in self._again]:
            self._fail_all(self._again.remove(row).request, self._recovery.poison_error())
        self._flush()

    def _restart(self, plan: Restart) -> None:
        assert self._keeper is not None
        self._progress.tell(f"{plan.why}; starting it again")
        num_failures = 0
        delay_s = plan.delay_s
        while self._wait(delay_s):
            try:
                self._engine = self._keeper.start(plan.config)
                break
            except Exception as error:  # noqa: BLE001  the job's edge: an engine may fail to start in any way
                num_failures += 1
                if num_failures == self._recovery.rules.max_starts:
                    raise self._recovery.cannot_start(error) from None
                delay_s = self._recovery.start_delay_s(num_failures)
        self._max_sequences = 2 * self._engine.settings.max_num_seqs + SPARE_SEQUENCES
        if self._has_ended:
            self._level()

    def _wait(self, seconds: float) -> bool:
        """False: the job is to stop, so there is nothing to wait for."""
        until = monotonic() + seconds
        while self._stop is None and (left := until - monotonic()) > 0:
            self._take_next(left)
            self._flush()
            self._look_for_end()
            if self._meter.is_due:
                self._show("running")
        return self._stop is None

    # What goes to the output: every line comes here once.

    def _finish(self, entry: InFlight) -> None:
        line, answers = entry.line, entry.answers
        del self._in_flight[answers.request.request_id]
        self._num_sequences -= line.params.num_sequences
        if answers.error is not None:
            self._abort(answers.request.request_id)  # its other sequences, if any still run
            self._fail_or_retry(entry.work, answers.error)
            return
        output = answers.output()
        self._answer(line, output)
        for follower in self._planner.finished(line.reply.index, output):
            self._answer(follower, output, is_copy=True)

    def _fail_or_retry(self, work: Work, error: str) -> None:
        """A form that the answer cannot have is the request's fault; what else the engine says may be different the
        next time, and rows of a job that is being stopped have a next time anyway."""
        line = work.request
        if line.params.structured_outputs is None:
            delay_s = 0.0 if self._stop is not None else self._recovery.may_retry(line.reply.index, ENGINE_ERROR)
            if delay_s is not None:
                self._again.put(work, delay_s=delay_s)
                self._in_flight_file.remove(line.reply.index)
                return
            error = f"{error} (tried {self._recovery.rules.max_attempts} times)"
        self._fail_all(line, RequestError(error, code=ENGINE_ERROR))

    def _answer(self, line: LineRequest, output: RequestOutput, *, is_copy: bool = False) -> None:
        self._write(line.reply.index, line.reply.answer(output, self._facts))
        self._tally.add_answer(line, output, is_copy=is_copy)

    def _fail_all(self, line: LineRequest, error: RequestError) -> None:
        """The line, and those of the same request."""
        for each in (line, *self._planner.finished(line.reply.index, None)):
            self._fail(each.reply, error)

    def _fail(self, reply: Reply, error: RequestError) -> None:
        self._write(reply.index, reply.error(error, self._facts), error=error.code)
        self._tally.add_error(reply.index, error)
        self._tally.refuse_too_many_errors(self._job.max_error_rate, is_resumable=self._job.is_resumable)

    def _write(self, index: int, result: dict[str, Any], *, error: str | None = None) -> None:
        self._results.append(index, self._encoder.encode(result), error=error)
        self._recovery.done(index)
        self._in_flight_file.remove(index)

    # What the user sees.

    def _flush(self) -> None:
        started = perf_counter()
        self._disk.flush(self._results)
        self._writing_seconds += perf_counter() - started

    def _show(self, state: JobState) -> None:
        status = self._meter.look(
            self._stats,
            self._tally,
            self._planner,
            num_total=self._num_expected,
            num_in_flight=len(self._in_flight),
            has_ended=self._has_ended,
            writing_seconds=self._writing_seconds,
            state=state,
        )
        status = replace(status, **self._recovery.status_fields)
        if state == "running" and self._disk.is_full:
            status = replace(status, state="paused", paused_because=self._disk.reason)
        self._progress.update(status)
        if self._directory is None or self._directory.is_ours():
            self._status_file.write(status, now=status.state != "running")

    @property
    def _stats(self) -> EngineStats:
        return joined(self._stats_before, self._engine.stats)

    def _report(self) -> JobReport:
        return JobReport(
            output=self._job.output,
            model_name=self._engine.model_name,
            was_stopped=self._stop is not None and not self._stop.is_expired,
            was_expired=self._stop is not None and self._stop.is_expired,
            was_cancelled=self._stop is not None and self._stop.is_cancelled,
            num_in_flight=len(self._in_flight),
            tally=self._tally,
            seconds=perf_counter() - self._started_at,
            start_seconds=self._engine.start_seconds,
            stats=self._stats,
            choices=self._engine.settings.choices,
            saved=saved_by(self._stats, self._planner),
            trouble=self._recovery.log.counts,
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


def _preparer(job: JobSpec, engine: Engine, directory: JobDirectory | None) -> LinePreparer:
    parser = LineParser(
        job.defaults,
        seed=job.config.seed,
        model_name=engine.model_name,
        template=job.template,
        overrides=job.overrides,
        is_redone=directory.redone.__contains__ if directory is not None else lambda index: False,
    )
    prompts = PromptReader(engine.tokenizer, engine.spec.vocab_size, engine.grammars)
    return LinePreparer(parser, prompts, seen=None if directory is None else directory.seen_ids)
