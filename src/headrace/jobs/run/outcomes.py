"""Writes and counts the result of each line. Every line comes here exactly once."""

from __future__ import annotations

from time import perf_counter

from headrace.errors import RequestError
from headrace.jobs.input.line_output import LineOutput
from headrace.jobs.input.lines import BadLine
from headrace.jobs.input.prepare import Work
from headrace.jobs.input.reply import JobFacts, Reply
from headrace.jobs.run.context import RunContext
from headrace.jobs.status.report import Tally


class Outcomes:
    """Owned by the job's main loop."""

    def __init__(self, context: RunContext) -> None:
        self._job = context.job
        self._facts = _facts_of(context)
        self._results = context.results
        self._planner = context.planner
        self._recovery = context.recovery
        self._disk = context.disk
        self._in_flight = context.in_flight
        self.tally = Tally()
        self.writing_seconds = 0.0

    def answer_all(self, line: Work, output: LineOutput) -> None:
        """The line and its duplicates."""
        self.answer(line, output)
        for duplicate in self._planner.finished(line.reply.index, output):
            self.answer(duplicate, output, is_copy=True)

    def answer(self, line: Work, output: LineOutput, *, is_copy: bool = False) -> None:
        reply = line.reply
        self._results.append(reply.index, reply.answer(output, self._facts))
        self._recovery.done(reply.index)
        self.tally.add_answer(line, output, is_copy=is_copy)

    def fail_all(self, line: Work, error: RequestError) -> None:
        """The line and its duplicates."""
        for each in (line, *self._planner.finished(line.reply.index, None)):
            self.fail(each.reply, error)

    def fail(self, reply: Reply, error: RequestError) -> None:
        self._results.append(reply.index, reply.error(error, self._facts), error=error.code)
        self._recovery.done(reply.index)
        self.tally.add_error(reply.index, error)
        self.refuse_too_many_errors()

    def fail_bad(self, line: BadLine) -> None:
        """A line that cannot start."""
        self.tally.num_bad += 1
        self.fail(line.reply, line.error)

    def refuse_too_many_errors(self) -> None:
        job = self._job
        self.tally.refuse_too_many_errors(
            job.max_error_rate, num_in_flight=len(self._in_flight), is_resumable=job.is_resumable
        )

    def flush(self) -> None:
        started = perf_counter()
        self._disk.flush(self._results)
        self.writing_seconds += perf_counter() - started

    @property
    def seconds_to_flush(self) -> float | None:
        return self._disk.seconds_to_try if self._disk.is_full else self._results.seconds_to_flush


def _facts_of(context: RunContext) -> JobFacts:
    """The job's id is the same in all its runs: it is part of the ids of its answers."""
    engine, directory = context.workers.engine, context.directory
    if directory is None:
        return JobFacts(engine.model_name, engine.tokenizer)
    return JobFacts(engine.model_name, engine.tokenizer, directory.job_id)
