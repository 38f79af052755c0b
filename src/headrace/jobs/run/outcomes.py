"""What became of each line: written and counted. Every line comes here once."""

from __future__ import annotations

from time import perf_counter

from headrace.engine.start import Engine
from headrace.errors import RequestError
from headrace.jobs.formats.writer import Results
from headrace.jobs.input.line_output import LineOutput
from headrace.jobs.input.prepare import Work
from headrace.jobs.input.reply import JobFacts, Reply
from headrace.jobs.planning.planner import Planner
from headrace.jobs.recovery.disk_full import DiskWait
from headrace.jobs.recovery.policy import Recovery
from headrace.jobs.spec import JobSpec
from headrace.jobs.status.report import Tally
from headrace.jobs.store.directory import JobDirectory


class Outcomes:
    """Owned by the job's run, as is all that it is made of."""

    def __init__(
        self, job: JobSpec, facts: JobFacts, results: Results, *, planner: Planner, recovery: Recovery, disk: DiskWait
    ) -> None:
        self._job = job
        self._facts = facts
        self._results = results
        self._planner = planner
        self._recovery = recovery
        self._disk = disk
        self.tally = Tally()
        self.writing_seconds = 0.0

    def answer_all(self, line: Work, output: LineOutput) -> None:
        """The line, and those of the same request."""
        self.answer(line, output)
        for follower in self._planner.finished(line.reply.index, output):
            self.answer(follower, output, is_copy=True)

    def answer(self, line: Work, output: LineOutput, *, is_copy: bool = False) -> None:
        reply = line.reply
        self._results.append(reply.index, reply.answer(output, self._facts))
        self._recovery.done(reply.index)
        self.tally.add_answer(line, output, is_copy=is_copy)

    def fail_all(self, line: Work, error: RequestError) -> None:
        """The line, and those of the same request."""
        for each in (line, *self._planner.finished(line.reply.index, None)):
            self.fail(each.reply, error)

    def fail(self, reply: Reply, error: RequestError) -> None:
        self._results.append(reply.index, reply.error(error, self._facts), error=error.code)
        self._recovery.done(reply.index)
        self.tally.add_error(reply.index, error)
        self.tally.refuse_too_many_errors(self._job.max_error_rate, is_resumable=self._job.is_resumable)

    def flush(self) -> None:
        started = perf_counter()
        self._disk.flush(self._results)
        self.writing_seconds += perf_counter() - started

    @property
    def seconds_to_flush(self) -> float | None:
        return self._disk.seconds_to_try if self._disk.is_full else self._results.seconds_to_flush


def facts_of(engine: Engine, directory: JobDirectory | None) -> JobFacts:
    """A job keeps its id over all its runs: it is part of the ids of its answers."""
    if directory is None:
        return JobFacts(engine.model_name, engine.tokenizer)
    return JobFacts(engine.model_name, engine.tokenizer, directory.job_id)
