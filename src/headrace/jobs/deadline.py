"""A job that must be over by some time: what is unfinished then becomes error lines, as at OpenAI's batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from time import monotonic

import msgspec

from headrace.errors import RequestError
from headrace.jobs.directory import JobDirectory
from headrace.jobs.lines import BadLine, LineParser
from headrace.jobs.reply import EXPIRED, JobFacts
from headrace.jobs.report import Tally
from headrace.jobs.spec import JobSpec

EXPIRED_MESSAGE = "This request could not be executed before the completion window expired."
BATCH_LINES = 1024


class Deadline:
    """Of one run: the time of day is looked at once, so that a clock that is set does not matter."""

    def __init__(self, at: float) -> None:
        self._until = monotonic() + at - time.time()

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._until - monotonic())

    @property
    def is_over(self) -> bool:
        return self.seconds_left == 0.0


def expire_rest(job: JobSpec, directory: JobDirectory, tally: Tally, *, flush: Callable[[], None]) -> None:
    """An error line for every row that has no result: what is unread is parsed and no more. A row that is no request
    has the error that it would have had anyway."""
    facts = JobFacts(job.config.model, None, directory.job_id)
    encoder = msgspec.json.Encoder()
    rows = _unfinished(job, directory)
    while batch := list(islice(rows, BATCH_LINES)):
        for item in batch:
            error = item.error
            directory.append(item.reply.index, encoder.encode(item.reply.error(error, facts)), error=error.code)
            tally.add_error(item.reply.index, error)
        flush()


def _unfinished(job: JobSpec, directory: JobDirectory) -> Iterator[BadLine]:
    parser = LineParser(job.defaults, seed=job.config.seed, model_name=job.config.model, template=job.template)
    with closing(job.open_input()) as source:
        for lines in source.read_batches(limit=job.limit, skip=directory.has_result):
            for line in lines:
                item = parser.parse(line)
                if isinstance(item, BadLine):
                    yield item
                else:
                    yield BadLine(item.reply, RequestError(EXPIRED_MESSAGE, code=EXPIRED))
