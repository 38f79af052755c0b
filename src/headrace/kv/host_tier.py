"""The host tier: which evicted block is at which place of the host's memory. Numbers only; the runner has the memory.

free ──take──▶ stored (least recently used first) ──pin──▶ pinned ──unpin──▶ stored
                 └── reused for another block, unless the planned step reads or writes it

A host block is a place for the content of one KV-cache block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np


class HostTier:
    """Owns the places of the host's memory. A digest is stored at most once."""

    def __init__(self, num_blocks: int, on_evict: Callable[[bytes], None] = lambda digest: None) -> None:
        """`on_evict` is told each block whose place is reused for another one."""
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self.last_step = np.full(num_blocks, -1, np.int64)  # the last planned step that reads or writes a place
        self._free = list(range(num_blocks - 1, -1, -1))
        self._stored: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._pinned: dict[bytes, int] = {}  # of these, those that a disk reads or writes
        self._busy: set[int] = set()  # places that the step in planning reads or writes

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._stored or digest in self._pinned

    @property
    def num_stored(self) -> int:
        return len(self._stored) + len(self._pinned)

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    def use(self, digest: bytes) -> int | None:
        """The place of a stored block, which becomes the most recently used one; None if it is not there."""
        place = self._stored.get(digest)
        if place is None:
            return self._pinned.get(digest)
        self._stored.move_to_end(digest)
        return place

    def place_of(self, digest: bytes) -> int:
        """The place of a stored block, which is not used by that."""
        return self._stored[digest]

    def take(self, digest: bytes) -> int | None:
        """A place for a new block, perhaps that of the least recently used one; None if all are in use."""
        assert digest not in self
        place = self._free.pop() if self._free else self._reuse()
        if place is not None:
            self._stored[digest] = place
        return place

    def _reuse(self) -> int | None:
        found = next((each for each in self._stored.items() if each[1] not in self._busy), None)
        if found is None:
            return None
        del self._stored[found[0]]
        self._on_evict(found[0])
        return found[1]

    def occupy(self, place: int) -> None:
        """Note that the step in planning reads or writes a place: its copies run in no order."""
        self._busy.add(place)

    def end_step(self, step: int) -> None:
        """The step has been planned."""
        self.last_step[list(self._busy)] = step
        self._busy.clear()

    def pin(self, digest: bytes) -> None:
        """Keep a stored block where it is until `unpin`."""
        self._pinned[digest] = self._stored.pop(digest)

    def unpin(self, digest: bytes) -> None:
        self._stored[digest] = self._pinned.pop(digest)

    def drop(self, digest: bytes) -> None:
        """Free the place of a pinned block, whose content did not arrive."""
        self._free.append(self._pinned.pop(digest))

    def clear(self) -> frozenset[bytes]:
        """Forget all blocks but pinned ones; returns those."""
        self._free += self._stored.values()
        self._stored.clear()
        return frozenset(self._pinned)
