"""A job's deadline: lines that are unfinished then become error lines, as in OpenAI's batches.

The run stops (`stop_state.py`). Then the input is read once more, and each line without a result gets its error line.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from time import monotonic

from headrace.errors import JobError, RequestError
from headrace.jobs.input.lines import BadLine, LineParser
from headrace.jobs.input.reply import EXPIRED, JobFacts
from headrace.jobs.spec import JobSpec
from headrace.jobs.status.report import Tally
from headrace.jobs.store.directory import JobDirectory
from headrace.jobs.store.status_file import STATUS_NAME, JobStatus, StatusFile, read_status

EXPIRED_MESSAGE = "This request could not be executed before the completion window expired."
BATCH_LINES = 1024


class Deadline:
    """The deadline of one run. The wall clock is read once, so a later change of the system's time has no effect."""

    def __init__(self, at: float) -> None:
        self._until = monotonic() + at - time.time()

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._until - monotonic())

    @property
    def is_over(self) -> bool:
        return self.seconds_left == 0.0


def expire_rest(job: JobSpec, directory: JobDirectory, tally: Tally, *, flush: Callable[[], None]) -> None:
    """Write an error line for every line without a result. Lines are parsed and no more; a line that is not a valid
    request gets the error that it would have had anyway."""
    facts = JobFacts(job.config.model, None, directory.job_id)
    lines = _unfinished(job, directory)
    while batch := list(islice(lines, BATCH_LINES)):
        for item in batch:
            error = item.error
            directory.append(item.reply.index, item.reply.error(error, facts), error=error.code)
            tally.add_error(item.reply.index, error)
        flush()


def show_expired(job: JobSpec, directory: JobDirectory, tally: Tally) -> JobStatus:
    """Write the last status again, with the lines that have expired since."""
    path = directory.path / STATUS_NAME
    try:
        last = read_status(path)
    except JobError:
        last = _first_status(job, directory)
    num_done = directory.num_before + tally.num_done
    status = replace(
        last,
        state="expired",
        updated_at=time.time(),
        lines_total=num_done,
        lines_done=num_done,
        lines_failed=tally.num_failed,
        lines_in_flight=0,
        lines_ready=0,
        errors=dict(tally.errors),
        **directory.journal_fields(tally.errors),
    )
    if directory.is_ours():
        StatusFile(path).write(status, now=True)
    return status


def _first_status(job: JobSpec, directory: JobDirectory) -> JobStatus:
    """Returns the status of a run that started after its deadline: no line was answered."""
    return JobStatus(
        state="expired",
        output=job.output,
        model=job.config.model,
        pid=os.getpid(),
        started_at=time.time(),
        updated_at=time.time(),
        seconds=0.0,
        lines_total=None,
        lines_done=directory.num_before,
        lines_before=directory.num_before,
        lines_answered=0,
        lines_failed=0,
        lines_in_flight=0,
        lines_ready=0,
        **directory.failure_log().counts.status_fields,
    )


def _unfinished(job: JobSpec, directory: JobDirectory) -> Iterator[BadLine]:
    parser = LineParser(
        job.defaults,
        seed=job.config.seed,
        model_name=job.config.model,
        template=job.template,
        adapters=tuple(job.config.adapter_paths),
        model_names=job.model_names,
    )
    with closing(job.open_input()) as source:
        for lines in directory.checked(source.read_batches(limit=job.limit, skip=directory.has_result)):
            for line in lines:
                item = parser.parse(line)
                if isinstance(item, BadLine):
                    yield item
                else:
                    yield BadLine(item.reply, RequestError(EXPIRED_MESSAGE, code=EXPIRED))
