"""How long a request may take: the server's limit, or what the client asks for if that is shorter."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from headrace.errors import RequestError
from headrace.server.errors import ApiError

T = TypeVar("T")
Headers = Iterable[tuple[bytes, bytes]]

REQUEST_TIMEOUT = b"x-request-timeout"  # seconds
QUEUE_TIMEOUT = b"x-queue-timeout"  # seconds


def seconds_in(headers: Headers, name: bytes) -> float | None:
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


class Deadline:
    """The moment at which a request is given up. `asked_s` can only shorten `limit_s`; without either it never comes."""

    def __init__(
        self, limit_s: float | None, asked_s: float | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        given = [seconds for seconds in (limit_s, asked_s) if seconds is not None]
        self._clock = clock
        self.seconds = min(given, default=None)
        self._at = None if self.seconds is None else clock() + self.seconds

    @classmethod
    def of(cls, headers: Headers, limit_s: float | None) -> Deadline:
        return cls(limit_s, seconds_in(headers, REQUEST_TIMEOUT))

    @property
    def remaining_s(self) -> float | None:
        return None if self._at is None else max(0.0, self._at - self._clock())

    @property
    def is_over(self) -> bool:
        return self._at is not None and self._clock() >= self._at

    def check(self) -> None:
        if self.is_over:
            raise self.error()

    async def wait_for(self, news: Awaitable[T]) -> T:
        """The result, or an error once the deadline has come; what was waited for is cancelled then."""
        self.check()
        if self._at is None:
            return await news
        try:
            async with asyncio.timeout(self.remaining_s) as limit:
                return await news
        except TimeoutError:
            if limit.expired():
                raise self.error() from None
            raise

    def error(self) -> ApiError:
        return ApiError(
            504,
            f"the request was given up after its {self.seconds:g} seconds; allow it more time, or ask for less",
            type="timeout_error",
            code="request_timeout",
        )
