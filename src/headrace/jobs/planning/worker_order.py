"""Divides the planned lines over the workers of a job: each takes lines from a run of neighbours of its own.

    plan   [ a a a a a a | b b b b | c c c c c c ]      letters are prefix groups
             ▲ worker 0              ▲ worker 1

A worker without lines takes a run that no worker has started, or else the second half of the longest run. A run is
split where its neighbours share the least, so whole prefix groups move, and a group is split only if it is the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import chain

from headrace.jobs.planning.pending import Pending
from headrace.jobs.planning.prefix_tree import shared_len

MAX_SPLIT_REACH = 1_024  # lines on each side of a run's middle among which it is split


class WorkerOrder:
    """Owned by the planner. Lines that are taken stay in their run until they are at its head."""

    def __init__(
        self,
        items: Sequence[Pending] = (),
        *,
        first: Sequence[Pending] = (),
        starts: Iterable[tuple[int, int]] = (),
        block_size: int = 1,
    ) -> None:
        """`first` run before all others, on any worker. `starts` are places in `items` and the workers that go on
        there, since their last lines share a prefix with what follows."""
        self._first = deque(first)
        self._block_size = block_size
        self._runs: dict[int, deque[Pending]] = {}  # by worker
        self._by_len: list[tuple[int, int]] = []  # a heap of negative lengths and workers; see `_longest`
        self._free: deque[deque[Pending]] = deque()  # of no worker, in the order of the plan
        begin, owner = 0, None
        for place, worker in (*sorted(starts), (len(items), None)):
            if place > begin:
                self._add(items if place - begin == len(items) else items[begin:place], owner)
            begin, owner = place, worker

    def __iter__(self) -> Iterator[Pending]:
        """All lines that are not known to be taken; some of them are."""
        return chain(self._first, *self._runs.values(), *self._free)

    def next(self, worker: int) -> Pending | None:
        """The line that the worker should run next. None: all are taken."""
        if self._first and (item := _head(self._first)) is not None:
            return item
        own = self._runs.get(worker)
        if own:
            if not own[0].is_taken:
                return own[0]
            if (item := _head(own)) is not None:
                return item
        while self._free:
            self._give(worker, own := self._free.popleft())
            if (item := _head(own)) is not None:
                return item
        while (longest := self._longest()) is not None:
            if _head(self._runs[longest]) is None:
                del self._runs[longest]
                continue
            self._give(worker, self._split(longest))
            if (item := _head(self._runs[worker])) is not None:
                return item
        return None

    def release(self, worker: int) -> None:
        """The worker takes no more lines for now: another may take its run."""
        if (run := self._runs.pop(worker, None)) is not None:
            self._free.append(run)

    def _add(self, items: Sequence[Pending], worker: int | None) -> None:
        if worker is None or worker in self._runs:
            self._free.append(deque(items))
        else:
            self._give(worker, deque(items))

    def _give(self, worker: int, run: deque[Pending]) -> None:
        self._runs[worker] = run
        heappush(self._by_len, (-len(run), worker))

    def _longest(self) -> int | None:
        """The worker with the longest run. Runs only become shorter, so an entry that is too long is put right once it
        is the first."""
        while self._by_len:
            length, owner = self._by_len[0]
            now = -len(self._runs.get(owner, ()))
            if now == length:
                return owner
            if now:
                heapreplace(self._by_len, (now, owner))
            else:
                heappop(self._by_len)
        return None

    def _split(self, owner: int) -> deque[Pending]:
        """Take the second half of a worker's run, or its only line."""
        items = [item for item in self._runs.pop(owner) if not item.is_taken]
        place = _place_to_split(items, self._block_size)
        if place:
            self._give(owner, deque(items[:place]))
        return deque(items[place:])


def _head(run: deque[Pending]) -> Pending | None:
    while run and run[0].is_taken:
        run.popleft()
    return run[0] if run else None


def _place_to_split(items: Sequence[Pending], block_size: int) -> int:
    """The place in the middle half at which neighbours share the shortest prefix; among equals, the most central."""
    middle = len(items) // 2
    reach = min(MAX_SPLIT_REACH, len(items) // 4)
    places = range(middle - reach, min(middle + reach + 1, len(items)))
    return min(
        (place for place in places if place > 0),
        key=lambda place: (shared_len(items[place - 1], items[place], block_size), abs(place - middle)),
        default=0,
    )
