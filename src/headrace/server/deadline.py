"""How long a request may take and wait: the server's limits, which a client may only shorten."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headrace.errors import RequestError

REQUEST_TIMEOUT = b"x-request-timeout"
QUEUE_TIMEOUT = b"x-queue-timeout"


class Deadlines:
    """Of requests, counted from their arrival at the gate."""

    def __init__(self, limit_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock

    def remaining_s(self, scope: Mapping[str, Any]) -> float | None:
        """What is left of a request's time; None: it has no end."""
        asked = seconds_in(scope["headers"], REQUEST_TIMEOUT)
        given = [seconds for seconds in (self._limit_s, asked) if seconds is not None]
        if not given:
            return None
        now = self._clock()
        arrived_at = float(scope.get("headrace", {}).get("arrived_at", now))
        return max(0.0, arrived_at + min(given) - now)


def seconds_in(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> float | None:
    """A header's number of seconds, or None if the request has no such header."""
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
