from __future__ import annotations

import asyncio

import pytest

from headrace.errors import RequestError
from headrace.server.deadline import QUEUE_TIMEOUT, REQUEST_TIMEOUT, Deadline, seconds_in
from headrace.server.errors import ApiError
from tests.server.hand_timer import HandTimer


@pytest.mark.parametrize(
    ("limit", "asked", "seconds"),
    [(None, None, None), (10.0, None, 10.0), (None, 3.0, 3.0), (10.0, 3.0, 3.0), (10.0, 30.0, 10.0)],
)
def test_a_client_can_only_shorten_the_limit(limit: float | None, asked: float | None, seconds: float | None) -> None:
    assert Deadline(limit, asked).seconds == seconds


def test_a_deadline_comes_when_its_time_has_passed() -> None:
    timer = HandTimer()
    deadline = Deadline(2.0, clock=timer)
    timer.move(1.5)
    assert (deadline.remaining_s, deadline.is_over) == (0.5, False)
    deadline.check()
    timer.move(0.5)
    assert (deadline.remaining_s, deadline.is_over) == (0.0, True)
    with pytest.raises(ApiError, match="given up after its 2 seconds") as error:
        deadline.check()
    assert (error.value.status, error.value.code) == (504, "request_timeout")


def test_without_a_limit_it_never_comes() -> None:
    deadline = Deadline(None)
    assert (deadline.remaining_s, deadline.is_over) == (None, False)

    async def body() -> str:
        return await deadline.wait_for(asyncio.sleep(0, "news"))

    assert asyncio.run(body()) == "news"


def test_what_is_waited_for_is_cancelled_at_the_deadline() -> None:
    async def body() -> None:
        never = asyncio.get_running_loop().create_future()
        with pytest.raises(ApiError, match="given up"):
            await Deadline(0.001).wait_for(never)
        assert never.cancelled()

    asyncio.run(body())


def test_a_timeout_error_of_what_is_waited_for_stays_its_own() -> None:
    async def fails() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        asyncio.run(Deadline(1000.0).wait_for(fails()))


def test_the_header_is_read_in_seconds() -> None:
    headers = [(b"host", b"x"), (REQUEST_TIMEOUT, b"2.5")]
    assert seconds_in(headers, REQUEST_TIMEOUT) == 2.5
    assert seconds_in(headers, QUEUE_TIMEOUT) is None
    assert Deadline.of(headers, 10.0).seconds == 2.5


@pytest.mark.parametrize("value", [b"", b"soon", b"0", b"-1", b"nan", b"inf", b"1e999"])
def test_a_header_that_is_no_time_is_refused_by_name(value: bytes) -> None:
    with pytest.raises(RequestError, match="must be a number of seconds above 0") as refused:
        Deadline.of([(REQUEST_TIMEOUT, value)], None)
    assert refused.value.param == "X-Request-Timeout"
