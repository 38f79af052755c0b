"""Lines that wait to run again."""

from __future__ import annotations

from collections.abc import Callable, Collection
from time import monotonic

from headrace.jobs.input.prepare import Work


class RetryQueue:
    """Lines that were taken from the planner, or kept from it, and are not in flight. There are few.

    Owned by the job's main loop."""

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._works: dict[int, tuple[float, Work]] = {}  # by line index: the earliest time to run, and the line

    def __len__(self) -> int:
        return len(self._works)

    def __contains__(self, index: int) -> bool:
        return index in self._works

    def put(self, work: Work, *, delay_s: float = 0.0) -> None:
        self._works[work.reply.index] = (self._clock() + delay_s, work)

    def due(self, among: Collection[int] | None = None) -> list[Work]:
        """Lines that may run now, in the input's order. They stay in the queue until `remove`."""
        now = self._clock()
        return [
            work for index, (at, work) in sorted(self._works.items()) if at <= now and (among is None or index in among)
        ]

    def all(self) -> list[Work]:
        return [work for _, work in self._works.values()]

    def remove(self, index: int) -> Work:
        return self._works.pop(index)[1]

    @property
    def seconds_to_next(self) -> float | None:
        """Seconds until the next line becomes due. None: no line will."""
        now = self._clock()
        later = [at - now for at, _ in self._works.values() if at > now]
        return min(later, default=None)
