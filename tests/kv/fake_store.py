"""A disk for tests of the tiers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.kv.tiers import Finished


class FakeStore:
    """A disk that does what it is told when the test says so."""

    def __init__(self, *digests: bytes, has_room: bool = True) -> None:
        self.digests = set(digests)
        self.has_room = has_room
        self.asked: list[tuple[str, bytes, int]] = []  # what, of which block, after the copies of which step
        self.places: dict[bytes, int] = {}  # of blocks that were to be read
        self.contents: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}  # for tests that need some
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

    def end_all(self, *, is_good: bool = True) -> None:
        for what, digest, _ in self.asked:
            self._done.append(Finished("read" if what == "read" else "written", digest, is_good))
            if what == "write" and is_good:
                self.digests.add(digest)
        self.asked.clear()

    def finished(self) -> Sequence[Finished]:
        done, self._done = self._done, []
        return done

    def wait(self, seconds: float) -> None: ...

    def clear(self) -> None:
        self.digests.clear()
