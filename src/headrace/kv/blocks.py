"""Reference counts and eviction of KV-cache blocks.

free ──take──▶ held (count ≥ 1) ──drop to 0──▶ free            it is not in the prefix index
                 ▲        └───────drop to 0──▶ idle            still in the prefix index
                 └──share (a prefix hit)────────┘ └─take─▶ evicted, least recently used first
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from headrace.kv.prefixes import PrefixIndex


class BlockPool:
    """Owns the reference count of every block. free + idle + held = num_blocks at all times."""

    def __init__(self, num_blocks: int, prefixes: PrefixIndex) -> None:
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self.num_drops = 0  # grows whenever blocks may have become available
        self._prefixes = prefixes
        self._counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def count(self, block: int) -> int:
        return self._counts[block]

    def num_idle_among(self, blocks: Iterable[int]) -> int:
        return sum(1 for block in blocks if self._counts[block] == 0)

    def take(self, num_blocks: int) -> list[int]:
        """Take blocks for a new owner. The caller has checked `num_available`."""
        assert num_blocks <= self.num_available, f"{num_blocks} blocks asked for, {self.num_available} available"
        num_from_free = min(num_blocks, len(self._free))
        taken = self._free[len(self._free) - num_from_free :]
        del self._free[len(self._free) - num_from_free :]
        while len(taken) < num_blocks:
            taken.append(self._evict())
        for block in taken:
            self._counts[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add one owner to each block; idle blocks become held."""
        counts = self._counts
        for block in blocks:
            if counts[block] == 0:
                del self._idle[block]
            counts[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """Remove one owner from each block. The last block of a sequence becomes the first to be evicted."""
        counts = self._counts
        for block in reversed(blocks):
            counts[block] = count = counts[block] - 1
            if count <= 0:
                assert count == 0, f"block {block} dropped more often than held"
                if block in self._prefixes:
                    self._idle[block] = None
                else:
                    self._free.append(block)
        self.num_drops += 1

    def forget_idle(self) -> None:
        """Evict every idle block: an empty prefix cache."""
        while self._idle:
            self._free.append(self._evict())

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self._prefixes.forget(block)
        self.num_evicted += 1
        return block
