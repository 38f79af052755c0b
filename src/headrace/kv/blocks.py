"""Reference counts and eviction of KV-cache blocks.

free ──take──▶ held (count ≥ 1) ──drop to 0──▶ free            it is not in the prefix index
                 ▲        └───────drop to 0──▶ idle            still in the prefix index
                 └──share (a prefix hit)────────┘ └─take─▶ evicted, least recently used first

With tiers, the next idle blocks to be evicted are clean: their content has been copied to the host before (`clean`), so
that no step waits for a copy when it takes them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from headrace.kv.prefixes import PrefixIndex
from headrace.kv.tiers import Tiers


class BlockPool:
    """Owns the reference count of every block. free + idle + held = num_blocks at all times."""

    def __init__(self, num_blocks: int, prefixes: PrefixIndex, tiers: Tiers | None = None, num_clean: int = 0) -> None:
        """`num_clean`: how many blocks `clean` keeps free or clean, for the next steps."""
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self.num_drops = 0  # grows whenever blocks may have become available
        self._prefixes = prefixes
        self._counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._clean: OrderedDict[int, None] = OrderedDict()  # idle too, and less recently used than those above
        self._tiers = tiers
        self._num_clean = num_clean

    @property
    def num_available(self) -> int:
        return len(self._free) + self.num_idle

    @property
    def num_idle(self) -> int:
        return len(self._idle) + len(self._clean)

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
                del (self._clean if block in self._clean else self._idle)[block]
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
        """Evict every idle block: an empty prefix cache, also in the tiers."""
        while self.num_idle:
            self._free.append(self._forget_next())
        if self._tiers is not None:
            self._tiers.clear()

    def clean(self, num_blocks: int | None = None) -> None:
        """Copy idle blocks to the tiers until `num_blocks` are free or clean. Called when a step is planned: nothing is
        evicted from among these before the next one."""
        assert self._tiers is not None
        target = self._num_clean if num_blocks is None else num_blocks
        while self._idle and len(self._free) + len(self._clean) < target:
            block, _ = self._idle.popitem(last=False)
            self._tiers.store(block, self._prefixes.digest_of(block))
            self._clean[block] = None

    def save(self, num_blocks: int) -> None:
        """Copy so many idle blocks to the tiers, the most recently used first, and free them."""
        assert self._tiers is not None
        for _ in range(min(num_blocks, len(self._idle))):
            block, _ = self._idle.popitem()
            self._tiers.store(block, self._prefixes.digest_of(block))
            self._prefixes.forget(block)
            self._free.append(block)

    def _evict(self) -> int:
        if self._tiers is not None and not self._clean:
            block = next(iter(self._idle))
            self._tiers.store(block, self._prefixes.digest_of(block), is_urgent=True)
        return self._forget_next()

    def _forget_next(self) -> int:
        block, _ = (self._clean or self._idle).popitem(last=False)
        self._prefixes.forget(block)
        self.num_evicted += 1
        return block
