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

# The default size of the queue: in multiples of what the engine can run, and at least this much. A small engine must
# not refuse the clients of a load test: refusals are fast, and make the worst settings look best (docs/decisions.md).
QUEUE_FACTOR = 4
MIN_QUEUED_REQS = 1024
MIN_QUEUED_TOKENS = 2**20  # 1,024 prompts of 1,024 tokens; such a queue holds 45 to 70 MB
REASONS = {
    "max_num_queued_reqs": f"4 x max_num_seqs, at least {MIN_QUEUED_REQS:,}",
    "max_num_queued_tokens": f"4 x the tokens of the KV cache, at least {MIN_QUEUED_TOKENS:,}",
}

WINDOW_S = 30  # window over which the drain rate is measured
MIN_BUSY_S = 1  # requests must have waited for this long without a break before the rate is measured
FIRST_RUN_S = 1.0  # assumed time that a request runs, until one has finished
RUN_SMOOTHING = 0.1  # weight of a finished request in the mean time
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
    max_num_seqs: int = 1  # of the engine: how many can run at once

    @classmethod
    def of(cls, options: ServerOptions, settings: Settings) -> QueueLimits:
        num_cache_tokens = settings.num_blocks * settings.block_size
        return cls(
            max_requests=options.max_num_queued_reqs or max(MIN_QUEUED_REQS, QUEUE_FACTOR * settings.max_num_seqs),
            max_tokens=options.max_num_queued_tokens or max(MIN_QUEUED_TOKENS, QUEUE_FACTOR * num_cache_tokens),
            max_num_seqs=settings.max_num_seqs,
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
        self._rate = DrainRate(limits.max_num_seqs, clock)
        self._num_refused = 0  # requests, for the spread of Retry-After
        self._arrivals: dict[Reservation, float] = {}  # arrival times of waiting requests, oldest first
        self._state = state

    @property
    def num_in_flight(self) -> int:
        return self.num_waiting + self.num_running

    @property
    def drain_rate(self) -> float:
        """Requests that start per second while others wait."""
        return self._rate.requests_per_s

    @property
    def oldest_wait_s(self) -> float:
        """The wait of the oldest waiting request."""
        return next((self._clock() - arrived for arrived in self._arrivals.values()), 0.0)

    @property
    def usage(self) -> float | None:
        """Waiting requests as a share of the limit; None without a limit."""
        limit: float | None = self.limits.max_requests
        return None if not limit or math.isinf(limit) else self.num_waiting / limit

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
            raise self._overloaded("queue_full", num_excess)
        self._check_tokens(num_tokens, num_others=self.num_waiting_tokens)
        if not self.num_waiting:
            self._rate.filled()
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
            num_per_request = self.num_waiting_tokens / self.num_waiting
            raise self._overloaded("queue_tokens", math.ceil(num_excess / max(1.0, num_per_request)))

    def _overloaded(self, reason: str, num_requests: int) -> Overloaded:
        """`num_requests`: how many of the waiting requests must start before this one has room."""
        self.refusals[reason] += 1
        is_full = reason == "queue_full"
        limit, what = (self.limits.max_requests, "requests") if is_full else (self.limits.max_tokens, "prompt tokens")
        return Overloaded(
            f"the queue is full: at most {limit:,} {what} may wait; try again later",
            reason=reason,
            retry_after_s=self._retry_after_s(num_requests),
            status=self._overload_status,
        )

    def _retry_after_s(self, num_requests: int) -> int:
        """Seconds until there is room, at most until the queue is empty.

        Each refused request is told the moment at which the next place is free, so that a refused burst does not come
        back in one second:

            waiting      1  2  3  4  5  6        they start in this order
            refused      1st    2nd ... 6th      the first needs one place; after the last, the first again
        """
        num_first = min(num_requests, self.num_waiting)
        turn = self._num_refused % (self.num_waiting - num_first + 1)
        self._num_refused += 1
        return self._rate.seconds_for(num_first + turn, num_running=self.num_running)

    # ---- for reservations

    def _recount(self, num_before: int, num_now: int) -> None:
        self._check_tokens(num_now, num_others=self.num_waiting_tokens - num_before)
        self.num_waiting_tokens += num_now - num_before

    def _leave_queue(self, reservation: Reservation, num_requests: int, num_tokens: int) -> None:
        del self._arrivals[reservation]
        self.num_waiting -= num_requests
        self.num_waiting_tokens -= num_tokens
        if not self.num_waiting:
            self._rate.emptied()

    def _start(self, reservation: Reservation, num_requests: int, num_tokens: int) -> float:
        """Returns the time."""
        self._rate.started(num_requests)
        self._leave_queue(reservation, num_requests, num_tokens)
        self.num_running += num_requests
        return self._clock()

    def _finish(self, num_requests: int, started_at: float) -> None:
        self.num_running -= num_requests
        self._rate.finished(self._clock() - started_at)


class Reservation:
    """The places of one HTTP request. Leaving the `with` block releases them."""

    def __init__(self, queue: RequestQueue, num_requests: int, num_tokens: int) -> None:
        self._queue = queue
        self._num_requests = num_requests
        self._num_tokens = num_tokens
        self._started_at = 0.0
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
            self._started_at = self._queue._start(self, self._num_requests, self._num_tokens)

    def release(self) -> None:
        if self._is_released:
            return
        self._is_released = True
        if self._is_waiting:
            self._is_waiting = False
            self._queue._leave_queue(self, self._num_requests, self._num_tokens)
        else:
            self._queue._finish(self._num_requests, self._started_at)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class DrainRate:
    """How fast waiting requests start.

    Measured while requests wait without a break. A rate from other times says how many requests came, not how many the
    engine can run. So at first, the rate is the engine's slots over the mean time that a request runs.
    """

    def __init__(self, max_num_seqs: int, clock: Callable[[], float]) -> None:
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._busy_since: float | None = None
        self._sums: deque[list[int]] = deque()  # [second, requests started] while busy
        self._mean_run_s: float | None = None

    def filled(self) -> None:
        """The first request waits."""
        self._busy_since = self._clock()
        self._sums.clear()

    def emptied(self) -> None:
        self._busy_since = None

    def started(self, num_requests: int) -> None:
        second = int(self._clock())
        if not self._sums or self._sums[-1][0] != second:
            self._forget(second)
            self._sums.append([second, 0])
        self._sums[-1][1] += num_requests

    def finished(self, run_s: float) -> None:
        mean = run_s if self._mean_run_s is None else self._mean_run_s
        self._mean_run_s = mean + RUN_SMOOTHING * (run_s - mean)

    @property
    def requests_per_s(self) -> float:
        now = self._clock()
        if self._busy_since is None or not self._is_measured:
            run_s = FIRST_RUN_S if self._mean_run_s is None else self._mean_run_s
            return self._max_num_seqs / max(run_s, 1e-3)
        self._forget(int(now))
        num_started = sum(number for _, number in self._sums)
        return max(1, num_started) / min(now - self._busy_since, WINDOW_S)

    def seconds_for(self, num_requests: int, *, num_running: int) -> int:
        """Whole seconds, at least one, until this many more have started. Free slots are taken at once."""
        num_free = 0 if self._is_measured else max(0, self._max_num_seqs - num_running)
        seconds = math.ceil(max(0, num_requests - num_free) / self.requests_per_s)
        return min(max(1, seconds), MAX_RETRY_S)

    @property
    def _is_measured(self) -> bool:
        return self._busy_since is not None and self._clock() - self._busy_since >= MIN_BUSY_S

    def _forget(self, second: int) -> None:
        while self._sums and self._sums[0][0] < second - WINDOW_S:
            self._sums.popleft()


_NOT_READY = {
    "starting": "the model is being loaded; try again soon",
    "draining": "the server is shutting down; try another one, or again later",
    "asleep": "the engine is asleep; POST /wake_up wakes it",
    "engine_dead": "the engine has stopped and is being restarted; try again soon",
}
