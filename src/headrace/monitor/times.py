"""When things happened to a request, and who writes that down while its events come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from headrace.types import Request, SequenceEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """A finished request, in seconds of one clock (`time.monotonic`)."""

    arrived: float
    finished: float
    queued_until: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_prompt: int = 0
    num_cached: int = 0
    num_generated: int = 0
    max_tokens: int | None = None
    n: int = 1
    num_preemptions: int = 0


class Metrics(Protocol):
    def tokens(self, num_new: int, gap_s: float | None) -> None: ...
    def finished(self, times: RequestTimes, reason: str) -> None: ...


class RequestMeter:
    """Follows one request from its arrival to its end. Owned by whoever takes its events."""

    def __init__(
        self, metrics: Metrics, request: Request, *, arrived: float, clock: Callable[[], float] = monotonic
    ) -> None:
        self._metrics = metrics
        self._request = request
        self._arrived = arrived
        self._clock = clock
        self._first_token: float | None = None
        self._last_token: float | None = None
        self._num_cached = 0
        self._num_tokens = 0
        self._is_finished = False

    def take(self, event: SequenceEvent, now: float | None = None) -> None:
        num_new = len(event.token_ids)
        self._num_cached = event.num_cached_tokens
        if num_new == 0:
            return
        now = self._clock() if now is None else now
        self._metrics.tokens(num_new, None if self._last_token is None else now - self._last_token)
        self._num_tokens += num_new
        self._first_token = now if self._first_token is None else self._first_token
        self._last_token = now

    def finish(self, reason: str) -> None:
        if self._is_finished:
            return
        self._is_finished = True
        params = self._request.params
        times = RequestTimes(
            arrived=self._arrived,
            finished=self._clock(),
            first_token=self._first_token,
            last_token=self._last_token,
            num_prompt=len(self._request.prompt_token_ids),
            num_cached=self._num_cached,
            num_generated=self._num_tokens,
            max_tokens=params.max_tokens,
            n=params.num_sequences,
        )
        self._metrics.finished(times, reason)
