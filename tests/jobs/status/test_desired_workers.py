"""How many workers a job needs."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.jobs.status.desired_workers import desired_workers

JOB: dict[str, Any] = {
    "num_workers": 4,
    "num_running": 4,
    "lines_left": 100_000,
    "max_num_seqs": 100,
    "seconds_left": 800.0,
    "seconds_to_deadline": None,
}


@pytest.mark.parametrize(
    ("changes", "desired"),
    [
        ({}, 4),
        ({"lines_left": 250}, 3),
        ({"lines_left": 1}, 1),
        ({"lines_left": 0}, 0),
        ({"lines_left": None}, 4),
        ({"seconds_to_deadline": 1_000.0}, 4),
        ({"seconds_to_deadline": 500.0}, 8),
        ({"seconds_to_deadline": 100_000.0}, 1),
        ({"seconds_to_deadline": 500.0, "num_running": 2}, 4),
        ({"seconds_to_deadline": 500.0, "lines_left": 420}, 5),
        ({"seconds_to_deadline": 500.0, "seconds_left": None}, 4),
        ({"seconds_to_deadline": 500.0, "num_running": 0}, 4),
        ({"seconds_to_deadline": 0.0}, 1_000),
    ],
)
def test_the_deadline_asks_for_workers_and_the_lines_left_limit_them(changes: dict[str, Any], desired: int) -> None:
    assert desired_workers(**JOB | changes) == desired
