"""Answers the lines of a job: the feed, the planner, the engine and the results meet here.

    reader thread:  lines -> prepared batches ──┐
    engine thread:  events of each step ────────┼──> inbox ──> this thread: submit, answer, write
    Ctrl-C, TERM:   stop ───────────────────────┘

Memory does not grow with the input: the planner holds a window of it, and requests in flight are bounded. What a step
finished is written before anything new is submitted, so that a crash costs no more than what was in flight. When the
engine dies, what was in flight waits (`jobs/recovery/retries`) until there is another, as `jobs/recovery/policy` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic

from headrace.engine.start import Engine
from headrace.errors import EngineDeadError, JobError, ResumableJobError
from headrace.jobs.formats.reader import InputLine
from headrace.jobs.formats.writer import Results
from headrace.jobs.input.feed import InputEnded, InputFailed, Prepared
from headrace.jobs.input.lines import BadLine
from headrace.jobs.input.prepare import Items
from headrace.jobs.input.prepare_process import MIN_LINES_FOR_PROCESS
from headrace.jobs.planning.planner import Planner
from headrace.jobs.planning.workload import WINDOW, Window
from headrace.jobs.recovery.disk_full import DiskWait
from headrace.jobs.recovery.engine_keeper import EngineKeeper
from headrace.jobs.recovery.policy import Progress, Recovery, Restart
from headrace.jobs.recovery.retries import Waiting
from headrace.jobs.run.collecting import Collector
from headrace.jobs.run.current_engine import CurrentEngine
from headrace.jobs.run.deadline import Deadline
from headrace.jobs.run.ending import Ending
from headrace.jobs.run.in_flight import LinesInFlight
from headrace.jobs.run.inbox import Inbox, Incoming, Message
from headrace.jobs.run.open_feed import open_feed
from headrace.jobs.run.outcomes import Outcomes, facts_of
from headrace.jobs.run.status_reporter import Bulletin
from headrace.jobs.run.stopping import Stop
from headrace.jobs.run.submitting import Submitter
from headrace.jobs.spec import JobSpec
from headrace.jobs.status.meter import TICK_SECONDS
from headrace.jobs.status.progress import JobProgress
from headrace.jobs.status.report import JobReport
from headrace.jobs.store.directory import JobDirectory
from headrace.jobs.store.failure_log import FailureLog
from headrace.jobs.store.in_flight_file import InFlightFile
from headrace.jobs.store.status_file import JobStatus


class JobRun:
    """Everything happens on the thread that calls `run`, one message at a time."""

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
        keeper: EngineKeeper | None = None,
        recovery: Recovery | None = None,
        in_flight_file: InFlightFile | None = None,
        deadline: Deadline | None = None,
        min_lines_for_process: int = MIN_LINES_FOR_PROCESS,
    ) -> None:
        """`num_expected` lines are left to do. Without a `directory` nothing is done yet, and nothing is kept; without
        a `keeper` of the engine its death is the end."""
        self._job = job
        self._directory = directory
        self._incoming = Incoming(inbox)
        self._current = CurrentEngine(engine, keeper)
        self._planner = Planner(engine.settings.limits, window=window)
        self._num_batches_owed = 0  # that the feed may read once the planner has room
        self._again = Waiting()
        self._in_flight = LinesInFlight(in_flight_file or InFlightFile(None))
        self._recovery = recovery or Recovery(FailureLog(None), job.config)
        self._ending = Ending(job.grace_s, directory=directory, deadline=deadline)
        self._disk = DiskWait(job.disk_wait_s, directory=directory.path if directory else None, tell=progress.tell)
        self._outcomes = Outcomes(
            job, facts_of(engine, directory), results, planner=self._planner, recovery=self._recovery, disk=self._disk
        )
        self._submitter = Submitter(
            self._current,
            self._planner,
            again=self._again,
            in_flight=self._in_flight,
            outcomes=self._outcomes,
            recovery=self._recovery,
        )
        self._collector = Collector(
            self._current,
            in_flight=self._in_flight,
            outcomes=self._outcomes,
            recovery=self._recovery,
            again=self._again,
            ending=self._ending,
        )
        self._bulletin = Bulletin(
            job,
            self._current,
            planner=self._planner,
            in_flight=self._in_flight,
            outcomes=self._outcomes,
            recovery=self._recovery,
            disk=self._disk,
            directory=directory,
            progress=progress,
            watch=watch,
            num_expected=num_expected,
        )
        self._feed = open_feed(
            job,
            engine,
            directory,
            lines,
            inbox.put,
            num_lines=num_expected,
            min_lines_for_process=min_lines_for_process,
        )

    def run(self) -> JobReport:
        self._feed.start()
        try:
            wait_s = TICK_SECONDS
            while not self._is_over:
                death, wait_s = self._turn(wait_s), TICK_SECONDS
                if death is not None:
                    self._recover(death)
                    wait_s = 0.0  # there is something to submit
            self._outcomes.flush()
        finally:
            self._feed.stop()
            for request_id in self._in_flight.ids:
                self._current.abort(request_id)
            self._in_flight.close()
            self._bulletin.show(self._ending.state if self._is_over else "failed")
        return self._bulletin.report(self._ending)

    def _turn(self, wait_s: float) -> EngineDeadError | None:
        """What is returned holds nothing of the engine that has died."""
        try:
            self._take_next(wait_s)
            self._outcomes.flush()
            self._submit_ready()
            self._look_around()
        except EngineDeadError as error:
            return error.with_traceback(None)
        return None

    @property
    def _is_over(self) -> bool:
        if self._ending.has_begun:
            return not self._in_flight or self._ending.is_over
        return self._planner.has_ended and not self._planner.num_held and not self._in_flight and not self._again

    def _submit_ready(self) -> None:
        if self._disk.is_full:
            return
        if not self._ending.has_begun:
            self._submitter.submit_ready()
        while self._num_batches_owed and self._planner.has_room:
            self._num_batches_owed -= 1
            self._feed.take_more()

    def _look_around(self) -> None:
        if not self._is_over and (stop := self._ending.look()) is not None:
            self._begin_to_stop(stop)
            if stop.is_expired:
                self._take_last_events()
        if self._bulletin.is_due:
            self._bulletin.show("running")

    def _begin_to_stop(self, stop: Stop) -> None:
        """Nothing new is started; what is in flight has until the grace is over."""
        self._ending.begin(stop)
        self._feed.stop()
        self._planner.drop_waiting()

    # What the inbox brings.

    def _take_next(self, at_most_s: float = TICK_SECONDS) -> None:
        """One message; or none, when it is time to flush, to leave, to look whether the job was cancelled, to try
        something again, or to show how things stand."""
        others = (
            TICK_SECONDS,
            self._outcomes.seconds_to_flush,
            self._again.seconds_to_next if self._again else None,
            self._ending.seconds_to_look,
        )
        for seconds in others:
            if seconds is not None and seconds < at_most_s:
                at_most_s = seconds
        message = self._incoming.take(at_most_s=max(0.0, at_most_s))
        if message is not None:
            self._take(message)

    def _take(self, message: Message) -> None:
        match message:
            case []:  # the engine's last word
                raise EngineDeadError(f"the engine has stopped: {self._current.engine.client.failure}")
            case list():
                self._collector.take(message)
            case Stop():
                self._begin_to_stop(message)
            case _ if self._ending.has_begun:  # what the feed had still to say
                pass
            case InputFailed(error):
                raise error
            case Prepared(items):
                self._take_prepared(items)
            case InputEnded(num_lines):
                self._bulletin.num_expected = num_lines
                self._planner.end_input()
                self._current.set_target_concurrency(self._planner.left())

    def _take_prepared(self, items: Items) -> None:
        planner, outcomes, suspects = self._planner, self._outcomes, self._recovery.suspects
        is_searching = suspects.trial is not None
        for item in items:
            if isinstance(item, BadLine):
                outcomes.fail(item.reply, item.error)
            elif is_searching and item.reply.index in suspects:
                self._again.put(item)
            elif (output := planner.add(item)) is not None:  # of the same request, earlier
                outcomes.answer(item, output, is_copy=True)
        self._num_batches_owed += 1

    # When the engine has died.

    def _recover(self, death: EngineDeadError) -> None:
        if not self._current.can_be_replaced:
            self._take_last_events()
            raise self._engine_death(death)
        lost = self._current.bury(death)
        self._take_last_events()
        if self._ending.has_begun:
            self._ending.hurry()
            return
        try:
            restart = self._recovery.engine_died(
                lost.failure, self._in_flight.rows, self._done_so_far, lost.settings, is_apart=lost.is_apart
            )
            self._requeue()
            self._restart(restart)
        except ResumableJobError as error:
            if self._job.is_resumable:
                raise
            raise JobError(f"{error} (but not this job: its input or output is a stream)") from error

    def _take_last_events(self) -> None:
        """What the engine had finished before it died, or its time was over."""
        for events in self._incoming.take_events():
            self._collector.take(events)
        self._outcomes.flush()

    @property
    def _done_so_far(self) -> Progress:
        if self._directory is None:
            return Progress(self._outcomes.tally.num_done, self._outcomes.tally.num_answered)
        journal = self._directory.journal
        return Progress(journal.num_done, journal.num_done - journal.num_errors)

    def _requeue(self) -> None:
        """What was in flight is done again, but for a row that is to blame."""
        for line in self._in_flight.give_up():
            self._again.put(line)
        for line in self._again.all() if self._recovery.has_poison else ():
            if (error := self._recovery.refuse(line)) is not None:
                self._outcomes.fail_all(self._again.remove(line.reply.index), error)
        self._outcomes.flush()

    def _restart(self, plan: Restart) -> None:
        self._bulletin.tell(f"{plan.why}; starting it again")
        num_failures = 0
        delay_s = plan.delay_s
        while self._wait(delay_s):
            try:
                self._current.start(plan.config)
                break
            except Exception as error:  # noqa: BLE001  the job's edge: an engine may fail to start in any way
                num_failures += 1
                if num_failures == self._recovery.rules.max_starts:
                    raise self._recovery.cannot_start(error) from None
                delay_s = self._recovery.start_delay_s(num_failures)
        if self._planner.has_ended:
            self._current.set_target_concurrency(self._planner.left())

    def _wait(self, seconds: float) -> bool:
        """False: the job is to stop, so there is nothing to wait for."""
        until = monotonic() + seconds
        while not self._ending.has_begun and (left := until - monotonic()) > 0:
            self._take_next(left)
            self._outcomes.flush()
            self._look_around()
        return not self._ending.has_begun

    def _engine_death(self, error: EngineDeadError) -> EngineDeadError:
        num_before, place = 0, self._job.output
        if self._directory is not None:
            num_before, place = self._directory.num_before, str(self._directory.path)
        again = "; the same command goes on from there" if self._job.is_resumable else ""
        return EngineDeadError(
            f"{error}; {num_before + self._outcomes.tally.num_done:,} lines are done and in {place}, "
            f"{len(self._in_flight):,} were in flight and are lost{again}"
        )
