"""The thread that reads ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from typing import Any, cast

import pytest

from headrace.errors import JobError
from headrace.jobs.formats.reader import InputLine
from headrace.jobs.input.feed import Feed, InputFailed, Prepared
from headrace.jobs.input.job_checks import JobChecks
from headrace.jobs.input.lines import LineParser
from headrace.jobs.input.prepare import Items


class Ahead:
    """Takes all batches before it returns the first, as a process that prepares lines may."""

    num_ahead = 8

    def prepare_all(self, batches: Iterable[list[InputLine]]) -> Iterator[Items]:
        parser = LineParser({}, seed=0, model_name="fake")
        for batch in list(batches):
            yield cast(Items, [parser.parse(line) for line in batch])


@pytest.mark.parametrize("num_batches", [0, 3])
def test_batches_before_an_unreadable_part_are_sent_before_the_error(num_batches: int) -> None:
    def read() -> Iterator[list[InputLine]]:
        for index in range(num_batches):
            yield [InputLine(index, 0, b"{broken")]
        raise JobError("in.gz is truncated")

    sent: SimpleQueue[Any] = SimpleQueue()
    Feed(read(), Ahead(), sent.put, checks=JobChecks(cast(Any, None))).start()
    messages = [sent.get(timeout=60) for _ in range(num_batches + 1)]
    assert [type(message) for message in messages] == [Prepared] * num_batches + [InputFailed]
    assert str(messages[-1].error) == "in.gz is truncated"
