"""Time limits of a request: the server's, which a client may only shorten."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.errors import RequestError

REQUEST_TIMEOUT = b"x-request-timeout"
QUEUE_TIMEOUT = b"x-queue-timeout"


def allowed_seconds(scope: Mapping[str, Any], limit_s: float | None) -> float | None:
    """The time for the whole request; None: unlimited."""
    asked = seconds_in(scope["headers"], REQUEST_TIMEOUT)
    return min((seconds for seconds in (limit_s, asked) if seconds is not None), default=None)


def seconds_in(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> float | None:
    """The seconds that a header gives; None: there is no such header."""
    for key, value in headers:
        if key == name:
            try:
                seconds = float(value)
            except ValueError:
                seconds = math.nan
            if not (math.isfinite(seconds) and seconds > 0):
                shown = name.decode().title()
                raise RequestError(f"{shown} must be a number of seconds above 0", param=shown)
            return seconds
    return None
