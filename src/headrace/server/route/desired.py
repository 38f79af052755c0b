"""The number of replicas that the load needs: a pure function of the last minutes, for an autoscaler.

    needed at a moment   = mean of (waiting + running requests) over WINDOW_S / target per replica, rounded up
    desired              = the largest of these in the last HOLD_S

So the number grows as soon as the mean does and falls only after the load has been lower for HOLD_S: starting a replica
is slow, and stopping one loses its prefix cache.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW_S = 15.0
HOLD_S = 300.0
TARGET_USE = 0.8  # of the sequences that a replica can run
DEFAULT_TARGET = 32.0  # requests of a replica that does not say how many it can run


@dataclass(frozen=True, slots=True)
class Demand:
    at_s: float
    num_requests: float  # that wait or run, on all replicas


@dataclass(frozen=True, slots=True)
class Needed:
    at_s: float
    num_replicas: int


def mean_demand(demands: Sequence[Demand], now: float) -> float:
    """Over WINDOW_S, of observations at about equal distances."""
    recent = [demand.num_requests for demand in demands if now - WINDOW_S < demand.at_s <= now]
    return sum(recent) / len(recent) if recent else 0.0


def needed_replicas(num_requests: float, target: float, *, least: int, most: int) -> int:
    """Replicas so that none has more than `target` requests."""
    return min(max(math.ceil(num_requests / target - 1e-9), least), most)


def desired_replicas(needed: Sequence[Needed], now: float, *, least: int) -> int:
    """The largest number needed in the last HOLD_S."""
    return max((each.num_replicas for each in needed if now - HOLD_S < each.at_s <= now), default=least)


class DesiredReplicas:
    """Keeps the observations that these functions need."""

    def __init__(self, *, least: int = 1, most: int = 1_000) -> None:
        self._least, self._most = least, most
        self._demands: deque[Demand] = deque()
        self._needed: deque[Needed] = deque()  # falling: an observation that a later, larger one hides is dropped
        self.value = least

    def observe(self, now: float, num_requests: float, target: float) -> int:
        self._demands.append(Demand(now, num_requests))
        while self._demands[0].at_s <= now - WINDOW_S:
            self._demands.popleft()
        needed = needed_replicas(mean_demand(self._demands, now), target, least=self._least, most=self._most)
        while self._needed and self._needed[-1].num_replicas <= needed:
            self._needed.pop()
        self._needed.append(Needed(now, needed))
        while self._needed[0].at_s <= now - HOLD_S:
            self._needed.popleft()
        self.value = desired_replicas(self._needed, now, least=self._least)
        return self.value
