"""The queue of waiting requests is bounded in requests and in tokens, and places are reserved up front.

    reserve ──▶ count_tokens ──▶ started ──▶ release
    (waiting, tokens estimated)  (running)   (done)

A place is reserved before the first await, so a burst cannot slip through while its first request is tokenized.
Everything runs on the event loop thread.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from headrace.engine.settings import Settings
from headrace.errors import HeadraceError, RequestError
from headrace.server.options import ServerOptions
from headrace.server.state import ServerState

QUEUE_FACTOR = 4  # default queue size, in multiples of what the engine can run

WINDOW_S = 30  # window over which the drain rate is measured
MAX_RETRY_S = 60


class Overloaded(HeadraceError):
    """The request is refused for now: retry after `retry_after_s`. `reason` is the label in metrics."""

    def __init__(self, message: str, *, reason: str, retry_after_s: int, status: int = 503) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.status = status


@dataclass(frozen=True, slots=True)
class QueueLimits:
    max_requests: int
    max_tokens: int

    @classmethod
    def of(cls, options: ServerOptions, settings: Settings) -> QueueLimits:
        num_cache_tokens = settings.num_blocks * settings.block_size
        return cls(
            max_requests=options.max_num_queued_reqs or QUEUE_FACTOR * settings.max_num_seqs,
            max_tokens=options.max_num_queued_tokens or QUEUE_FACTOR * num_cache_tokens,
        )


class RequestQueue:
    """Owns the counts. A request waits from `reserve` until its `started`, and is in flight until its `release`."""

    def __init__(
        self,
        options: ServerOptions,
        limits: QueueLimits,
        clock: Callable[[], float] = time.monotonic,
        state: ServerState | None = None,
    ) -> None:
        self.limits = limits
        self.refusals: Counter[str] = Counter()
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        self.num_running = 0
        self._overload_status = options.overload_status
        self._drain_seconds = math.ceil(options.shutdown_timeout_s)
        self._clock = clock
        self._departures = Departures(clock)
        self._arrivals: dict[Reservation, float] = {}  # arrival times of waiting requests, oldest first
        self._state = state

    @property
    def num_in_flight(self) -> int:
        return self.num_waiting + self.num_running

    @property
    def drain_rate(self) -> float:
        """Requests started per second."""
        return self._departures.requests_per_s

    @property
    def oldest_wait_s(self) -> float:
        """The wait of the oldest waiting request."""
        return next((self._clock() - arrived for arrived in self._arrivals.values()), 0.0)

    def reserve(self, num_requests: int = 1, *, num_tokens: int = 0) -> Reservation:
        """Reserve places for `num_requests`, all or none. `num_tokens`: an estimate, until `count_tokens`.

        An empty queue accepts any number of tokens.
        """
        self._refuse_if_not_ready()
        if num_requests > self.limits.max_requests:
            raise RequestError(
                f"{num_requests:,} prompts at once are more than the {self.limits.max_requests:,} that may wait; "
                "send fewer at a time",
                param="prompt",
                code="too_many_prompts",
            )
        num_excess = self.num_waiting + num_requests - self.limits.max_requests
        if num_excess > 0:
            raise self._overloaded("queue_full", "requests", num_excess, self._departures.requests_per_s)
        self._check_tokens(num_tokens, num_others=self.num_waiting_tokens)
        self.num_waiting += num_requests
        self.num_waiting_tokens += num_tokens
        reservation = Reservation(self, num_requests, num_tokens)
        self._arrivals[reservation] = self._clock()
        return reservation

    def _refuse_if_not_ready(self) -> None:
        reason = None if self._state is None else self._state.refuse_reason()
        if reason is None:
            return
        self.refusals[reason] += 1
        seconds = self._drain_seconds if reason == "draining" else 1
        raise Overloaded(_NOT_READY[reason], reason=reason, retry_after_s=min(max(1, seconds), MAX_RETRY_S), status=503)

    def _check_tokens(self, num_tokens: int, *, num_others: int) -> None:
        num_excess = num_others + num_tokens - self.limits.max_tokens
        if num_others and num_excess > 0:
            raise self._overloaded("queue_tokens", "prompt tokens", num_excess, self._departures.tokens_per_s)

    def _overloaded(self, reason: str, what: str, num_excess: int, rate: float) -> Overloaded:
        self.refusals[reason] += 1
        seconds = math.ceil(num_excess / rate) if rate > 0 else MAX_RETRY_S
        limit = self.limits.max_requests if reason == "queue_full" else self.limits.max_tokens
        return Overloaded(
            f"the queue is full: at most {limit:,} {what} may wait; try again later",
            reason=reason,
            retry_after_s=min(max(1, seconds), MAX_RETRY_S),
            status=self._overload_status,
        )

    # ---- for reservations

    def _recount(self, num_before: int, num_now: int) -> None:
        self._check_tokens(num_now, num_others=self.num_waiting_tokens - num_before)
        self.num_waiting_tokens += num_now - num_before

    def _leave_queue(self, reservation: Reservation, num_requests: int, num_tokens: int) -> None:
        del self._arrivals[reservation]
        self.num_waiting -= num_requests
        self.num_waiting_tokens -= num_tokens

    def _start(self, reservation: Reservation, num_requests: int, num_tokens: int) -> None:
        self._leave_queue(reservation, num_requests, num_tokens)
        self._departures.add(num_requests, num_tokens)
        self.num_running += num_requests


class Reservation:
    """The places of one HTTP request. Leaving the `with` block releases them."""

    def __init__(self, queue: RequestQueue, num_requests: int, num_tokens: int) -> None:
        self._queue = queue
        self._num_requests = num_requests
        self._num_tokens = num_tokens
        self._is_waiting = True
        self._is_released = False

    def count_tokens(self, num_tokens: int) -> None:
        """Replace the estimate by the true number. If the queue cannot hold it, the places are released."""
        if not self._is_waiting:
            return
        try:
            self._queue._recount(self._num_tokens, num_tokens)
        except Overloaded:
            self.release()
            raise
        self._num_tokens = num_tokens

    def started(self) -> None:
        """The request runs now: free its place in the queue."""
        if self._is_waiting:
            self._is_waiting = False
            self._queue._start(self, self._num_requests, self._num_tokens)

    def release(self) -> None:
        if self._is_released:
            return
        self._is_released = True
        if self._is_waiting:
            self._is_waiting = False
            self._queue._leave_queue(self, self._num_requests, self._num_tokens)
        else:
            self._queue.num_running -= self._num_requests

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Departures:
    """The rate at which requests leave the queue to run: sums per second over a window."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sums: deque[list[int]] = deque()  # [second, requests, tokens]

    def add(self, num_requests: int, num_tokens: int) -> None:
        second = int(self._clock())
        if not self._sums or self._sums[-1][0] != second:
            self._forget(second)
            self._sums.append([second, 0, 0])
        self._sums[-1][1] += num_requests
        self._sums[-1][2] += num_tokens

    @property
    def requests_per_s(self) -> float:
        return self._rate(1)

    @property
    def tokens_per_s(self) -> float:
        return self._rate(2)

    def _rate(self, column: int) -> float:
        now = self._clock()
        self._forget(int(now))
        if not self._sums:
            return 0.0
        return sum(sums[column] for sums in self._sums) / max(1.0, now - self._sums[0][0])

    def _forget(self, second: int) -> None:
        while self._sums and self._sums[0][0] <= second - WINDOW_S:
            self._sums.popleft()


_NOT_READY = {
    "starting": "the model is being loaded; try again soon",
    "draining": "the server is shutting down; try another one, or again later",
    "engine_dead": "the engine has stopped and is being restarted; try again soon",
}
