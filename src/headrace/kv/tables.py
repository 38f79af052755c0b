"""Block tables: each sequence's blocks in order; sharing, copy on write, publishing for reuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from headrace.kv.blocks import BlockPool
from headrace.kv.prefixes import Parent, PrefixHit, PrefixIndex, Salt
from headrace.kv.tiers import Tiers
from headrace.steps import BlockTransfers
from headrace.types import TokenIds


class BlockCopy(NamedTuple):
    """The device copies `source` to `target` before the step computes anything."""

    source: int
    target: int


@dataclass(slots=True)
class BlockTable:
    """One sequence's blocks. Changed by `BlockTables` alone."""

    blocks: list[int]
    last_entry: Parent  # prefix entry of the last published block
    num_published: int  # leading blocks that are findable


class BlockTables:
    """Owns the pool and the prefix index that all block tables use."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        tiers: Tiers | None = None,
        num_clean: int = 0,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.tiers = tiers
        self._prefixes = PrefixIndex(block_size, None if tiers is None else tiers.chain)
        self.pool = BlockPool(num_blocks, self._prefixes, tiers, num_clean)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, token_ids: TokenIds, salt: Salt | None) -> PrefixHit:
        if not self.enable_prefix_caching:
            return PrefixHit((), salt or "")
        return self._prefixes.find(token_ids, salt)

    def stored_after(self, hit: PrefixHit, token_ids: TokenIds) -> list[bytes]:
        """The blocks of a prompt after those of the hit that the host tier holds."""
        return [] if self.tiers is None else self.tiers.find(self._digests_after(hit, token_ids))

    def digests_after(self, hit: PrefixHit, token_ids: TokenIds) -> list[bytes]:
        """The names in the tiers of a prompt's blocks after those of the hit."""
        return list(self._digests_after(hit, token_ids))

    def take_transfers(self, step: int) -> BlockTransfers | None:
        """The copies between the pool and the host tier that belong to this step."""
        if self.tiers is None:
            return None
        self.pool.clean()
        return self.tiers.take_transfers(step)

    def take_saving_transfers(self, step: int) -> BlockTransfers | None:
        """Copies of idle blocks to the host tier, from where they go to the disk; None if there are none left."""
        if self.tiers is None:
            return None
        self.tiers.poll()
        self.pool.save(self.tiers.num_to_save)
        return self.tiers.take_transfers(step)

    def is_saving(self) -> bool:
        """Whether blocks are on their way from the host tier to the disk."""
        if self.tiers is None:
            return False
        self.tiers.poll()
        return self.tiers.is_writing

    def wait_for_fetch(self, seconds: float) -> None:
        """If prompts wait for blocks from the disk, wait until some have been read."""
        if self.tiers is not None and self.tiers.is_fetching:
            self.tiers.wait(seconds)

    def _digests_after(self, hit: PrefixHit, token_ids: TokenIds) -> Iterator[bytes]:
        assert self.tiers is not None and isinstance(hit.last_entry, bytes)
        tokens = token_ids[hit.num_blocks * self.block_size :]
        return self.tiers.chain.digests(hit.last_entry, tokens.tobytes(), 4 * self.block_size)

    def open_stored(self, hit: PrefixHit, token_ids: TokenIds, stored: list[bytes]) -> BlockTable:
        """Open a table for a prompt that shares the hit's blocks, and whose next ones are filled from the host tier.
        All of these are findable from now on."""
        assert self.tiers is not None
        places = self.tiers.reserve(stored)
        table = self.open(hit, len(token_ids))
        first, end = hit.num_blocks, hit.num_blocks + len(stored)
        self.tiers.load(stored, places, table.blocks[first:end])
        self.publish(table, token_ids, end * self.block_size)
        return table

    def open(self, hit: PrefixHit, num_tokens: int) -> BlockTable:
        """Open a table that shares the hit's blocks and has room for `num_tokens`."""
        self.pool.share(hit.blocks)
        own = self.pool.take(max(0, self.num_blocks_for(num_tokens) - hit.num_blocks))
        return BlockTable([*hit.blocks, *own], hit.last_entry, hit.num_blocks)

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """Open a second table over the blocks that hold the first `num_tokens` of another."""
        shared = table.blocks[: self.num_blocks_for(num_tokens)]
        assert table.num_published <= len(shared), "forked before its last published block"
        self.pool.share(shared)
        return BlockTable(shared, table.last_entry, table.num_published)

    def make_writable(self, table: BlockTable, position: int) -> BlockCopy | None:
        """Copy on write: replace the block of `position` by a copy if other tables hold it too."""
        index = position // self.block_size
        shared = table.blocks[index]
        if self.pool.count(shared) == 1:
            return None
        (own,) = self.pool.take(1)
        table.blocks[index] = own  # the published original stays findable; this copy continues its chain
        self.pool.drop([shared])
        return BlockCopy(shared, own)

    def publish(self, table: BlockTable, token_ids: TokenIds, num_computed: int) -> None:
        """Make the full blocks among the first `num_computed` tokens findable."""
        if not self.enable_prefix_caching:
            return
        first, end = table.num_published, num_computed // self.block_size
        if first < end:
            tokens = token_ids[first * self.block_size : end * self.block_size]
            table.last_entry = self._prefixes.register(table.last_entry, tokens, table.blocks[first:end])
            table.num_published = end

    def close(self, table: BlockTable) -> None:
        self.pool.drop(table.blocks)
        table.blocks = []
