"""How often a failed engine is started again, and how long to wait before each start.

The server's supervisor (`engine/process/supervisor.py`) and batch jobs (`jobs/recovery/policy.py`) use the same policy
object with different numbers. The supervisor counts its restarts in a sliding window; a job counts failed starts in a
row, and has limits of its own for engines that die without progress.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from time import monotonic


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Exponential backoff with a limit: delays double from `first_delay_s` up to `max_delay_s`."""

    max_starts: int  # after that many the engine stays dead
    window_s: float = math.inf  # starts that are older than this do not count
    first_delay_s: float
    max_delay_s: float = math.inf
    jitter: float = 0.0  # share of a delay by which it is shortened at random, at most

    def delay_s(self, num_failures: int, random: Random | None = None) -> float:
        """Returns the delay before the start that follows failure number `num_failures`, counted from 1."""
        delay_s = min(self.max_delay_s, self.first_delay_s * 2.0 ** (num_failures - 1))
        return delay_s if random is None else delay_s * random.uniform(1.0 - self.jitter, 1.0)


SUPERVISOR_RESTARTS = RestartPolicy(max_starts=5, window_s=600.0, first_delay_s=1.0)
JOB_RESTARTS = RestartPolicy(max_starts=3, first_delay_s=0.5, max_delay_s=30.0, jitter=0.5)


class RestartCounter:
    """Counts the starts of one engine within the policy's window. Used by one thread."""

    def __init__(self, policy: RestartPolicy, clock: Callable[[], float] = monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._started_at: deque[float] = deque()

    def next_delay_s(self) -> float | None:
        """Counts a start and returns the delay before it. None: the limit is reached."""
        now = self._clock()
        while self._started_at and self._started_at[0] <= now - self._policy.window_s:
            self._started_at.popleft()
        if len(self._started_at) >= self._policy.max_starts:
            return None
        self._started_at.append(now)
        return self._policy.delay_s(len(self._started_at))
