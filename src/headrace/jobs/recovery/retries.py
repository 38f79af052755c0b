"""Work that has to be done again: how often, and when."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from random import Random
from time import monotonic

from headrace.jobs.input.prepare import Work


@dataclass(frozen=True, kw_only=True)
class RetryRules:
    """For failures that are not the request's fault."""

    max_attempts: int = 5  # of a row that the engine answers with an error
    max_starts: int = 3  # of an engine that cannot be started again
    max_idle_deaths: int = 4  # of an engine, in a row, by which nothing was done or learned
    first_delay_s: float = 0.5  # the next ones are twice as long each, and all are shortened by chance
    max_delay_s: float = 30.0

    def delay_s(self, num_failures: int, random: Random) -> float:
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** (num_failures - 1)) * random.uniform(0.5, 1.0)


class Waiting:
    """Rows that were taken from the planner, or kept from it, and are not in flight: few. Owned by the job's run."""

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._works: dict[int, tuple[float, Work]] = {}  # by row: from when on it may run

    def __len__(self) -> int:
        return len(self._works)

    def __contains__(self, row: int) -> bool:
        return row in self._works

    def put(self, work: Work, *, delay_s: float = 0.0) -> None:
        self._works[work.reply.index] = (self._clock() + delay_s, work)

    def due(self, among: Collection[int] | None = None) -> list[Work]:
        """Those that may run now, lowest rows first; they stay here until `remove`."""
        now = self._clock()
        return [
            work for row, (at, work) in sorted(self._works.items()) if at <= now and (among is None or row in among)
        ]

    def all(self) -> list[Work]:
        return [work for _, work in self._works.values()]

    def remove(self, row: int) -> Work:
        return self._works.pop(row)[1]

    @property
    def seconds_to_next(self) -> float | None:
        """None: nothing will become due."""
        now = self._clock()
        later = [at - now for at, _ in self._works.values() if at > now]
        return min(later, default=None)
