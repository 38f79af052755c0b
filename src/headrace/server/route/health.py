"""The health of one replica: a score from errors, latency and queue, and whether it gets requests.

            score < DRAIN_BELOW, no connection, not ready
       up ────────────────────────────────────────────────▶ out ──┐
       ▲                                                     ▲    │ after a wait: 1 s, 2 s, 4 s ... 30 s
       │   the request is answered            it fails again │    ▼
       └─────────────────────────────────────────────────── probing   gets one request at a time

Draining: a replica that is out finishes the requests it has. Times are given by the caller, in seconds.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Literal

State = Literal["up", "out", "probing"]
STATES: tuple[State, ...] = ("up", "out", "probing")

DRAIN_BELOW = 0.3
ERROR_HALF_LIFE_S = 10.0
PRIOR_ANSWERS = 2.0  # good answers that are assumed: one error alone is not an error share of 1
LATENCY_TOLERANCE = 3.0  # times the median of the other replicas, without a lower score
MIN_LATENCY_PART = 0.5  # long prompts are slow too: latency alone takes no replica out
QUEUE_TOLERANCE = 4.0
NUM_LATENCIES = 16  # the last ones, of which the median counts
MIN_NUM_LATENCIES = 5
MIN_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
STEADY_S = 60.0  # a replica that was up for this long begins again with the shortest wait


def score_of(error_share: float, latency_ratio: float, queue_ratio: float) -> float:
    """From 0 to 1. Ratios are against the median of the other replicas. An error share of 0.46 alone is below
    DRAIN_BELOW, and so is a queue of 14 times the median, or of 7 times together with six times the latency."""
    errors = (1 - error_share) ** 2
    latency = max(min(1.0, LATENCY_TOLERANCE / latency_ratio), MIN_LATENCY_PART) if latency_ratio > 0 else 1.0
    queue = min(1.0, QUEUE_TOLERANCE / queue_ratio) if queue_ratio > 0 else 1.0
    return errors * latency * queue


class Health:
    """Owned by its replica."""

    def __init__(self) -> None:
        self._first_bytes_s: deque[float] = deque(maxlen=NUM_LATENCIES)  # of streams
        self.reason = ""  # why it is out, for people
        self._num_errors = self._num_answers = 0.0  # they decay
        self._decayed_at = 0.0
        self._backoff_s = 0.0  # of the last time out
        self._out_until: float | None = None  # None: it is up
        self._up_since = 0.0
        self._is_ready = True

    @property
    def is_ready(self) -> bool:
        """Whether the replica could be reached and says that it takes requests."""
        return self._is_ready

    def state(self, now: float) -> State:
        if not self._is_ready:
            return "out"
        if self._out_until is None:
            return "up"
        return "out" if now < self._out_until else "probing"

    @property
    def first_byte_s(self) -> float | None:
        """The median of the last streams; None if there were too few."""
        return median(self._first_bytes_s) if len(self._first_bytes_s) >= MIN_NUM_LATENCIES else None

    def error_share(self, now: float) -> float:
        self._decay(now)
        return self._num_errors / (self._num_answers + PRIOR_ANSWERS)

    def answered(self, now: float, first_byte_s: float | None = None) -> None:
        """A request was answered. `first_byte_s`: of a stream, the time until its first byte."""
        if self._out_until is not None:
            if now < self._out_until:
                return  # it began before the replica was taken out
            self._come_back(now)
        self._decay(now)
        self._num_answers += 1
        if first_byte_s is not None:
            self._first_bytes_s.append(first_byte_s)

    def failed(self, now: float, why: str) -> None:
        """A request got no answer, or an error that is the replica's. A probe that fails ends the probing."""
        if self.state(now) == "probing":
            self.take_out(now, why)
        self._decay(now)
        self._num_answers += 1
        self._num_errors += 1

    def take_out(self, now: float, why: str) -> None:
        """Give it no requests for a while, each time longer. Nothing changes for a replica that is out."""
        if self._out_until is not None and now < self._out_until:
            return
        was_steady = self._out_until is None and now - self._up_since >= STEADY_S
        doubled = MIN_BACKOFF_S if was_steady or not self._backoff_s else 2 * self._backoff_s
        self._backoff_s = min(doubled, MAX_BACKOFF_S)
        self._out_until = now + self._backoff_s
        self.reason = why

    def set_ready(self, is_ready: bool, why: str = "") -> None:
        """What the replica itself says. One that becomes ready gets requests at once."""
        if self._is_ready and not is_ready:
            self.reason = why
        self._is_ready = is_ready

    def _come_back(self, now: float) -> None:
        self._out_until, self._up_since, self.reason = None, now, ""
        self._num_errors = self._num_answers = 0.0
        self._first_bytes_s.clear()

    def _decay(self, now: float) -> None:
        share = 0.5 ** (max(0.0, now - self._decayed_at) / ERROR_HALF_LIFE_S)
        self._num_errors *= share
        self._num_answers *= share
        self._decayed_at = now
