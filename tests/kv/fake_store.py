"""Disks for tests of the tiers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from headrace.kv.tiers import Finished, Side

Content = tuple[np.ndarray, np.ndarray]  # of a block of `CheckingRunner`


class FakeStore:
    """A disk that does what it is told when the test says so."""

    def __init__(self, *digests: bytes, has_room: bool = True) -> None:
        self.digests = set(digests)
        self.has_room = has_room
        self.asked: list[tuple[str, bytes, int]] = []  # what, of which block, after the copies of which step
        self.places: dict[bytes, int] = {}  # of blocks that were to be read
        self.contents: dict[bytes, Content] = {}  # for tests that need some
        self._done: list[Finished] = []

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.digests

    def write(self, digest: bytes, place: int, step: int) -> bool:
        if self.has_room:
            self.asked.append(("write", digest, step))
        return self.has_room

    def read(self, digest: bytes, place: int, step: int) -> None:
        self.asked.append(("read", digest, step))
        self.places[digest] = place

    def end_all(self, *, is_good: bool = True, at: float = 0.0) -> None:
        for what, digest, _ in self.asked:
            self._done.append(Finished("read" if what == "read" else "written", digest, is_good, at))
            if what == "write" and is_good:
                self.digests.add(digest)
        self.asked.clear()

    def finished(self) -> Sequence[Finished]:
        done, self._done = self._done, []
        return done

    def wait(self, seconds: float) -> None: ...

    def clear(self) -> None:
        self.digests.clear()


class TimedStore:
    """A disk that takes so many seconds for each block, one after the other, by the clock of the test. `memory`: that
    of the host, by place; `end_copies`: makes the copies that were planned."""

    def __init__(self, clock: Callable[[], float], *, read_s: float, write_s: float = 0.0, max_queued: int = 8) -> None:
        self.memory: dict[int, Content] = {}
        self.end_copies: Callable[[], None] = lambda: None
        self.contents: dict[bytes, Content] = {}
        self.read_s = read_s
        self.num_reads = 0
        self._clock = clock
        self._write_s = write_s
        self._max_queued = max_queued
        self._reads: deque[tuple[float, bytes, int]] = deque()  # when they end, of which block, to which place
        self._writes: deque[tuple[float, bytes, int]] = deque()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.contents

    def write(self, digest: bytes, place: int, step: int) -> bool:
        if len(self._writes) >= self._max_queued:
            return False
        self._writes.append((self._end(self._writes, self._write_s), digest, place))
        return True

    def read(self, digest: bytes, place: int, step: int) -> None:
        self.num_reads += 1
        self._reads.append((self._end(self._reads, self.read_s), digest, place))

    def _end(self, queue: deque[tuple[float, bytes, int]], seconds: float) -> float:
        return max(self._clock(), queue[-1][0] if queue else 0.0) + seconds

    @property
    def next_end(self) -> float | None:
        """When the next read ends."""
        return self._reads[0][0] if self._reads else None

    def finished(self) -> Sequence[Finished]:
        done: list[Finished] = []
        self.end_copies()
        sides: tuple[tuple[Side, deque[tuple[float, bytes, int]]], ...]
        sides = (("read", self._reads), ("written", self._writes))
        for side, queue in sides:
            while queue and queue[0][0] <= self._clock():
                at, digest, place = queue.popleft()
                if side == "read":
                    self.memory[place] = self.contents[digest]
                else:
                    self.contents[digest] = self.memory[place]
                done.append(Finished(side, digest, True, at))
        return done

    def wait(self, seconds: float) -> None: ...

    def clear(self) -> None:
        self.contents.clear()
