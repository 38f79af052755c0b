"""Triton-style dynamic batching in front of an engine that batches continuously.

The engine has `max_batch_size` places. Requests wait here and enter in batches:

- At once, if enough wait to fill all free places.
- At once, as the largest preferred size that can be formed.
- Else all that wait, when the oldest has waited `max_queue_delay_s` (the batching delay).

A request that has waited `timeout_s` is refused, or moves behind all requests of its priority and above that have not
timed out. Without any of these settings requests enter at once, and the engine's own queue is the only one.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from headrace.errors import RequestError
from headrace.server.options import ServerOptions
from headrace.server.request_queue import Overloaded


class Alarm(Protocol):
    def cancel(self) -> None: ...


class Timer(Protocol):
    """A clock with delayed calls. An event loop is one."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[[], None]) -> Alarm: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPolicy:
    max_batch_size: int
    preferred_sizes: tuple[int, ...] = ()  # ascending
    max_queue_delay_s: float = 0.0
    timeout_s: float | None = None
    timeout_action: Literal["reject", "delay"] = "reject"
    allow_timeout_override: bool = False
    by_priority: bool = False  # lower numbers first; else in the order of arrival

    @classmethod
    def of(cls, options: ServerOptions, *, max_num_seqs: int, by_priority: bool = False) -> BatchPolicy:
        return cls(
            max_batch_size=max_num_seqs,
            preferred_sizes=tuple(size for size in options.preferred_batch_sizes if size <= max_num_seqs),
            max_queue_delay_s=options.max_queue_delay_us / 1e6,
            timeout_s=options.queue_timeout_us / 1e6 or None,
            timeout_action=options.queue_timeout_action,
            allow_timeout_override=options.allow_timeout_override,
            by_priority=by_priority,
        )

    @property
    def is_trivial(self) -> bool:
        return not self.max_queue_delay_s and self.timeout_s is None

    def timeout_of(self, asked_s: float | None) -> float | None:
        """The timeout of a request. It may shorten the default if that is allowed, never lengthen it."""
        if asked_s is None:
            return self.timeout_s
        if not self.allow_timeout_override or self.timeout_s is None:
            raise RequestError(
                "this server does not accept queue timeouts from requests (--allow-timeout-override)",
                param="X-Queue-Timeout",
            )
        return min(asked_s, self.timeout_s)


@dataclass(slots=True, eq=False)
class Waiting:
    """One request in the queue."""

    priority: int
    size: int  # sequences
    since: float
    expires_at: float | None
    future: asyncio.Future[None]
    is_late: bool = False


Queue = dict[Waiting, None]  # oldest first


class Dispatcher:
    """Owns the queue and the count of occupied places."""

    def __init__(self, policy: BatchPolicy, timer: Timer | None = None) -> None:
        self._policy = policy
        self._timer = timer
        self._by_priority: dict[int, tuple[Queue, Queue]] = {}  # by priority: in time, and timed out
        self._expiries: list[
            tuple[float, int, Waiting]
        ] = []  # a heap; requests that have left stay until they reach the top
        self._num_arrived = 0
        self._num_waiting_seqs = 0
        self._num_taken = 0
        self._alarm: Alarm | None = None
        self.batch_sizes: list[int] = []  # sequences of each of the last 16 batches
        self.num_rejected = 0

    @property
    def num_waiting(self) -> int:
        return sum(1 for _ in self._in_order())

    @asynccontextmanager
    async def enter(self, *, size: int = 1, priority: int = 0, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Wait for a place in the engine and keep it while inside. `size` is the number of sequences."""
        timeout_s = self._policy.timeout_of(timeout_s)
        if self._policy.is_trivial:
            yield
            return
        waiting = self._enqueue(min(size, self._policy.max_batch_size), priority, timeout_s)
        try:
            if waiting.future.done():
                await asyncio.sleep(0)  # after those of the same batch that came before
            await waiting.future
        except asyncio.CancelledError:
            if waiting.future.done() and not waiting.future.cancelled():
                self._give_back(waiting.size)  # entered and cancelled in the same loop iteration
            else:
                self._remove(waiting)
                self._dispatch_ready()
            raise
        try:
            yield
        finally:
            self._give_back(waiting.size)

    def close(self) -> None:
        """Refuse all waiting requests."""
        for waiting in list(self._in_order()):
            self._refuse(waiting, "draining", "the server is shutting down; try another one, or again later")
        self._set_alarm()

    # ---- the queue

    def _time(self) -> float:
        return self._clock().time()

    def _clock(self) -> Timer:
        if self._timer is None:
            self._timer = asyncio.get_running_loop()
        return self._timer

    def _enqueue(self, size: int, priority: int, timeout_s: float | None) -> Waiting:
        now = self._time()
        waiting = Waiting(
            priority=priority if self._policy.by_priority else 0,
            size=size,
            since=now,
            expires_at=None if timeout_s is None else now + timeout_s,
            future=asyncio.get_running_loop().create_future(),
        )
        self._num_arrived += 1
        if waiting.expires_at is not None:
            heapq.heappush(self._expiries, (waiting.expires_at, self._num_arrived, waiting))
        self._insert(waiting)
        self._dispatch_ready()
        return waiting

    def _insert(self, waiting: Waiting) -> None:
        self._by_priority.setdefault(waiting.priority, ({}, {}))[waiting.is_late][waiting] = None
        self._num_waiting_seqs += waiting.size

    def _in_order(self) -> Iterator[Waiting]:
        """Waiting requests in order of entry: by priority, and within it those in time before those timed out."""
        for priority in sorted(self._by_priority):
            in_time, late = self._by_priority[priority]
            yield from in_time
            yield from late

    def _remove(self, waiting: Waiting) -> None:
        queues = self._by_priority[waiting.priority]
        del queues[waiting.is_late][waiting]
        self._num_waiting_seqs -= waiting.size
        if not any(queues):
            del self._by_priority[waiting.priority]

    def _give_back(self, size: int) -> None:
        self._num_taken -= size
        self._dispatch_ready()

    # ---- the rules

    def _dispatch_ready(self) -> None:
        """Let requests in by the rules, and set the timer for the next check."""
        self._apply_timeouts()
        while batch := self._next_batch():
            for waiting in batch:
                self._remove(waiting)
                self._num_taken += waiting.size
                waiting.future.set_result(None)
            self.batch_sizes.append(sum(waiting.size for waiting in batch))
            del self.batch_sizes[:-16]
        self._set_alarm()

    def _apply_timeouts(self) -> None:
        while (expiry := self._next_expiry()) is not None and expiry <= self._time():
            waiting = heapq.heappop(self._expiries)[2]
            if self._policy.timeout_action == "reject":
                self.num_rejected += 1
                self._refuse(waiting, "queue_timeout", "the request has waited too long in the queue; try again later")
            else:
                self._remove(waiting)
                waiting.is_late = True
                self._insert(waiting)

    def _next_expiry(self) -> float | None:
        while self._expiries and self._expiries[0][2].future.done():
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def _refuse(self, waiting: Waiting, reason: str, message: str) -> None:
        self._remove(waiting)
        if not waiting.future.done():
            waiting.future.set_exception(Overloaded(message, reason=reason, retry_after_s=1))

    def _next_batch(self) -> list[Waiting]:
        """The requests to let in now; empty if none."""
        num_free = self._policy.max_batch_size - self._num_taken
        fitting = self._that_fit(num_free)
        if not fitting:
            return []
        if self._num_waiting_seqs >= num_free or not self._policy.max_queue_delay_s:
            return fitting
        if self._time() >= self._oldest_since(fitting) + self._policy.max_queue_delay_s:
            return fitting
        return self._preferred(fitting)

    def _that_fit(self, num_free: int) -> list[Waiting]:
        """The longest run from the head of the queue that fits the free places. Order is kept."""
        fitting: list[Waiting] = []
        for waiting in self._in_order():
            num_free -= waiting.size
            if num_free < 0:
                break
            fitting.append(waiting)
        return fitting

    def _preferred(self, fitting: list[Waiting]) -> list[Waiting]:
        """The longest run from the head of the queue whose size is a preferred one."""
        best, size = 0, 0
        for number, waiting in enumerate(fitting, 1):
            size += waiting.size
            if size in self._policy.preferred_sizes:
                best = number
        return fitting[:best]

    @staticmethod
    def _oldest_since(fitting: list[Waiting]) -> float:
        return min(waiting.since for waiting in fitting)

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        expiry = self._next_expiry()
        moments = [] if expiry is None else [expiry]
        fitting = self._that_fit(self._policy.max_batch_size - self._num_taken)
        if fitting:
            moments.append(self._oldest_since(fitting) + self._policy.max_queue_delay_s)
        if moments:
            self._alarm = self._clock().call_later(max(0.0, min(moments) - self._time()), self._dispatch_ready)
