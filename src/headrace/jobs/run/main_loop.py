"""The main loop of a run: takes messages, writes what has finished, submits what may start.

    reader thread    prepared batches ──┐
    worker threads   events of a step ──┼─▶ inbox ─▶ this thread: collect ─▶ write ─▶ submit ─▶ check stop, show status
    signal handler   StopRequest ───────┘

What a step finished is written before anything new is submitted, so that a crash loses no more than what was in flight.
When a worker's engine dies, its lines in flight wait in `RetryQueue`; `Restarter` replaces it while the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headrace.errors import JobError
from headrace.jobs.formats.reader import InputLine
from headrace.jobs.input.feed import InputEnded, InputFailed, Prepared
from headrace.jobs.input.lines import BadLine
from headrace.jobs.input.prepare import Items
from headrace.jobs.input.prepare_process import MIN_LINES_FOR_PROCESS
from headrace.jobs.run.collecting import Collector
from headrace.jobs.run.context import RunContext
from headrace.jobs.run.inbox import InboxReader, Message
from headrace.jobs.run.open_feed import open_feed
from headrace.jobs.run.outcomes import Outcomes
from headrace.jobs.run.restarting import Restarter
from headrace.jobs.run.stall import StallCheck
from headrace.jobs.run.status_reporter import StatusReporter
from headrace.jobs.run.stop_state import StopRequest, stopping
from headrace.jobs.run.submitting import Submitter
from headrace.jobs.status.meter import TICK_SECONDS
from headrace.jobs.status.report import JobReport
from headrace.jobs.store.status_file import JobStatus


class MainLoop:
    """The main loop of a run. Everything happens on the thread that calls `run`."""

    def __init__(
        self,
        context: RunContext,
        lines: Iterable[list[InputLine]],
        *,
        num_expected: int | None = None,
        min_lines_for_process: int = MIN_LINES_FOR_PROCESS,
        on_status: Callable[[JobStatus], None] = lambda status: None,
    ) -> None:
        """`num_expected` lines are left to do, if that is known."""
        self._job = context.job
        self._workers = context.workers
        self._planner = context.planner
        self._in_flight = context.in_flight
        self._retries = context.retries
        self._recovery = context.recovery
        self._stop = context.stop
        self._disk = context.disk
        self._inbox = InboxReader(context.inbox)
        self._outcomes = Outcomes(context)
        self._submitter = Submitter(context, self._outcomes)
        self._collector = Collector(context, self._outcomes)
        self._restarter = Restarter(context, self._outcomes, self._take_last_events)
        self._stall = StallCheck(context, self._restarter)
        self._reporter = StatusReporter(context, self._outcomes, num_expected=num_expected, on_status=on_status)
        self._input_error: JobError | None = None  # why the rest of the input cannot be read
        self._num_batches_to_request = 0  # from the feed, once the planner has room
        self._feed = open_feed(
            context.job,
            context.workers.engine,
            context.directory,
            lines,
            context.inbox.put,
            num_lines=num_expected,
            min_lines_for_process=min_lines_for_process,
        )

    def run(self) -> JobReport:
        self._feed.start()
        try:
            while not self._is_over:
                self._take_next()
                self._outcomes.flush()
                self._restarter.check()
                self._submit_ready()
                self._check_stop()
                self._show_status()
            self._outcomes.flush()
            if self._has_failed:
                assert self._input_error is not None
                raise self._input_error
        finally:
            self._feed.stop()
            for entry in self._in_flight.requests:
                self._workers[entry.worker].abort(entry.request.request_id)
            self._in_flight.close()
            self._reporter.show(self._stop.final_state if self._is_over and not self._has_failed else "failed")
            self._reporter.close()
        return self._reporter.report()

    @property
    def _is_over(self) -> bool:
        if self._stop.is_stopping:
            return self._stop.is_grace_over or not any(
                self._in_flight.num_sequences(worker.number)
                for worker in self._workers
                if worker.is_running or worker.death is not None
            )
        return self._planner.has_ended and not self._planner.num_held and not self._in_flight and not self._retries

    @property
    def _has_failed(self) -> bool:
        """Whether the input could not be read to its end. A job that is stopped reports that instead."""
        return self._input_error is not None and not self._stop.is_stopping

    def _submit_ready(self) -> None:
        if self._disk.is_full:
            return
        if not self._stop.is_stopping:
            was_idle = self._stall.is_idle
            if not self._submitter.submit_ready() and was_idle and self._stall.is_idle:
                raise stopping(self._job, self._stall.error())
        while self._num_batches_to_request and self._planner.has_room:
            self._num_batches_to_request -= 1
            self._feed.take_more()

    def _check_stop(self) -> None:
        if not self._is_over and (request := self._stop.check()) is not None:
            self._begin_stop(request)
            if request.is_expired:
                self._take_last_events()

    def _begin_stop(self, request: StopRequest) -> None:
        """Start no new lines; lines in flight may finish within the grace period."""
        self._stop.begin(request)
        self._feed.stop()
        self._planner.drop_waiting()

    def _show_status(self) -> None:
        if self._reporter.is_due:
            self._reporter.show("running")

    # Messages.

    def _take_next(self) -> None:
        """Wait for a message and take it, with others that are there: at most one per worker, since an iteration costs
        more with more workers. Returns without one when it is time to flush, to retry a line, to start an engine, to
        check for a stop, or to show the status."""
        timeout_s = TICK_SECONDS
        others = (
            self._outcomes.seconds_to_flush,
            self._retries.seconds_to_next if self._retries else None,
            self._restarter.seconds_to_next,
            self._stop.seconds_to_check,
        )
        for seconds in others:
            if seconds is not None and seconds < timeout_s:
                timeout_s = seconds
        message = self._inbox.take(timeout_s=max(0.0, timeout_s))
        if message is not None:
            self._take(message)
            for more in self._inbox.take_more(len(self._workers) - 1):
                self._take(more)

    def _take(self, message: Message) -> None:
        match message:
            case []:  # a worker has died, or has started an engine
                pass
            case list():
                self._collector.take(message)
            case StopRequest():
                self._begin_stop(message)
            case _ if self._stop.is_stopping:  # the feed's messages are of no use any more
                pass
            case InputFailed(error):
                if not isinstance(error, JobError):
                    raise error
                self._input_error = error  # raised once the lines before it are answered
                self._end_input()
            case Prepared(items):
                self._take_prepared(items)
            case InputEnded(num_lines):
                self._reporter.num_expected = num_lines
                self._end_input()

    def _end_input(self) -> None:
        self._planner.end_input()
        self._workers.set_target_concurrency(self._planner.left())

    def _take_prepared(self, items: Items) -> None:
        planner, outcomes, recovery = self._planner, self._outcomes, self._recovery
        is_searching = recovery.is_searching
        tally = outcomes.tally
        for item in items:
            tally.num_read += 1
            if isinstance(item, BadLine):
                outcomes.fail_bad(item)
            elif is_searching and recovery.is_suspect(item.reply.index):
                self._retries.put(item)
            elif (output := planner.add(item)) is not None:  # a duplicate of a line that was answered before
                outcomes.answer(item, output, is_copy=True)
        outcomes.refuse_too_many_errors()  # with these lines, there may be enough to judge earlier errors
        self._num_batches_to_request += 1

    def _take_last_events(self) -> None:
        """Events that arrived before a worker died, or before the deadline."""
        for events in self._inbox.take_events():
            self._collector.take(events)
        self._outcomes.flush()
