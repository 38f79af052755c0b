from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.server.deadline import QUEUE_TIMEOUT, REQUEST_TIMEOUT, Deadlines, seconds_in
from tests.server.hand_timer import HandTimer


def scope(asked: bytes | None = None, arrived_at: float = 0.0) -> dict[str, Any]:
    headers = [(b"host", b"x")] + ([] if asked is None else [(REQUEST_TIMEOUT, asked)])
    return {"headers": headers, "headrace": {"arrived_at": arrived_at}}


@pytest.mark.parametrize(
    ("limit", "asked", "seconds"),
    [(None, None, None), (10.0, None, 10.0), (None, b"3", 3.0), (10.0, b"2.5", 2.5), (10.0, b"30", 10.0)],
)
def test_a_client_can_only_shorten_the_limit(limit: float | None, asked: bytes | None, seconds: float | None) -> None:
    assert Deadlines(limit, HandTimer()).remaining_s(scope(asked)) == seconds


def test_the_time_runs_from_the_arrival_on() -> None:
    timer = HandTimer()
    deadlines = Deadlines(2.0, timer)
    timer.move(1.5)
    assert deadlines.remaining_s(scope()) == 0.5
    assert deadlines.remaining_s(scope(arrived_at=1.0)) == 1.5
    timer.move(5.0)
    assert deadlines.remaining_s(scope()) == 0.0


@pytest.mark.parametrize("value", [b"", b"soon", b"0", b"-1", b"nan", b"inf", b"1e999"])
def test_a_header_that_is_no_time_is_refused_by_name(value: bytes) -> None:
    with pytest.raises(RequestError, match="must be a number of seconds above 0") as refused:
        Deadlines(None).remaining_s(scope(value))
    assert refused.value.param == "X-Request-Timeout"


def test_a_header_that_is_not_there_asks_for_nothing() -> None:
    assert seconds_in(scope(b"1")["headers"], QUEUE_TIMEOUT) is None
