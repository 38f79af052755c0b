"""Timestamps of one request, collected from its events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from headrace.types import Request, SequenceEvent, SequenceTiming


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """A finished request. Times are in seconds of `time.monotonic`, which the engine's process shares."""

    arrived: float
    finished: float
    queued_until: float | None = None  # its first step; None: it had none, or it is not known
    first_token: float | None = None
    last_token: float | None = None
    num_prompt: int = 0
    num_cached: int = 0
    num_generated: int = 0  # over all its sequences
    num_longest: int | None = None  # of the longest sequence; None: there is only one
    n: int = 1
    num_preemptions: int = 0
    engine: int = 0  # the number of the engine that ran it
    first_token_is_counted: bool = False  # `ServerMetrics.first_token` was called when it came


class Metrics(Protocol):
    def first_token(self, seconds: float, *, engine: int = 0) -> None: ...

    def finished(self, times: RequestTimes, reason: str) -> None: ...


class RequestMeter:
    """Follows one request from its arrival to its end. Owned by the reader of its events.

    >>> meter = RequestMeter(metrics, request, arrived=arrived)
    >>> meter.take(event)              # each event with a timing: the first and the last of a sequence
    >>> meter.finish("stop", [12])     # once, with the length of each answer; later calls do nothing
    """

    __slots__ = (
        *("_arrived", "_clock", "_first_token", "_is_finished", "_last_token", "_metrics"),
        *("_num_cached", "_num_preemptions", "_queued_until", "_request", "engine"),
    )

    def __init__(
        self, metrics: Metrics, request: Request, *, arrived: float, clock: Callable[[], float] = monotonic
    ) -> None:
        self._metrics = metrics
        self._request = request
        self._arrived = arrived
        self._clock = clock
        self._queued_until: float | None = None
        self._first_token: float | None = None
        self._last_token: float | None = None
        self._num_cached = 0
        self._num_preemptions = 0
        self._is_finished = False
        self.engine = 0  # the number of the engine that runs it

    def take(self, event: SequenceEvent) -> None:
        """Take in an event. Only the first and the last event of a sequence carry a timing."""
        if event.timing is not None:
            self._note(event, event.timing)

    def finish(self, reason: str, lengths: Sequence[int] = ()) -> RequestTimes | None:
        """Record the end: a finish reason, `abort` or `error`, and the number of tokens of each answer.

        Returns what was recorded; None if it has been recorded before.
        """
        if self._is_finished:
            return None
        self._is_finished = True
        now = self._clock()
        last_token = self._last_token
        if last_token is None and self._first_token is not None:  # ended by a stop string, which the front found
            last_token = now
        times = RequestTimes(
            arrived=self._arrived,
            finished=now,
            queued_until=self._queued_until,
            first_token=self._first_token,
            last_token=last_token,
            num_prompt=len(self._request.prompt_token_ids),
            num_cached=self._num_cached,
            num_generated=sum(lengths),
            num_longest=max(lengths, default=0),
            n=self._request.params.num_sequences,
            num_preemptions=self._num_preemptions,
            engine=self.engine,
            first_token_is_counted=True,
        )
        self._metrics.finished(times, reason)
        return times

    def _note(self, event: SequenceEvent, timing: SequenceTiming) -> None:
        self._queued_until = _earlier(self._queued_until, timing.started_at)
        if self._first_token is None and timing.first_token_at is not None:
            self._first_token = timing.first_token_at
            self._metrics.first_token(timing.first_token_at - self._arrived, engine=self.engine)
        if event.index == 0:
            self._num_cached = event.num_cached_tokens
        if event.finish_reason is not None:
            self._num_preemptions += timing.num_preemptions
            self._last_token = _later(self._last_token, timing.last_token_at)


def _earlier(a: float | None, b: float | None) -> float | None:
    return a if b is None else b if a is None else min(a, b)


def _later(a: float | None, b: float | None) -> float | None:
    return a if b is None else b if a is None else max(a, b)
