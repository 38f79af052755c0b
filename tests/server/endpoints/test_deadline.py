from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.server.endpoints.deadline import QUEUE_TIMEOUT, REQUEST_TIMEOUT, allowed_seconds, seconds_in


def scope(asked: bytes | None = None) -> dict[str, Any]:
    return {"headers": [(b"host", b"x")] + ([] if asked is None else [(REQUEST_TIMEOUT, asked)])}


@pytest.mark.parametrize(
    ("limit", "asked", "seconds"),
    [(None, None, None), (10.0, None, 10.0), (None, b"3", 3.0), (10.0, b"2.5", 2.5), (10.0, b"30", 10.0)],
)
def test_a_client_can_only_shorten_the_limit(limit: float | None, asked: bytes | None, seconds: float | None) -> None:
    assert allowed_seconds(scope(asked), limit) == seconds


@pytest.mark.parametrize("value", [b"", b"soon", b"0", b"-1", b"nan", b"inf", b"1e999"])
def test_a_header_that_is_no_time_is_refused_by_name(value: bytes) -> None:
    with pytest.raises(RequestError, match="must be a number of seconds above 0") as refused:
        allowed_seconds(scope(value), None)
    assert refused.value.param == "X-Request-Timeout"


def test_without_the_header_there_is_no_limit() -> None:
    assert seconds_in(scope(b"1")["headers"], QUEUE_TIMEOUT) is None
