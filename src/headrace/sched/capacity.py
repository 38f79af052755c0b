"""Whether the KV cache has room for one more sequence, under the capacity policies that TensorRT-LLM defines."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config import CapacityPolicy
from headrace.kv import BlockTable, BlockTables, PrefixHit
from headrace.sched.sequence import Sequence

WATERMARK = 0.01  # share of the blocks that starting sequences leave free, so that running ones can grow for a while


@dataclass(frozen=True, slots=True)
class BlockDemand:
    """The number of available blocks that starting a sequence takes."""

    num_now: int
    num_to_end: int  # including `num_now`


class Capacity:
    """Counts reserved blocks.

    `max_utilization` admits what fits now and relies on preemption. `guaranteed_no_evict` reserves, for every running
    sequence, the blocks that it may still need to its end. So does `static_batch`, whose batches start together."""

    def __init__(self, tables: BlockTables, policy: CapacityPolicy) -> None:
        self._tables = tables
        self._reserves = policy != "max_utilization"
        self._num_reserved = 0
        self._num_watermark = int(tables.pool.num_blocks * WATERMARK)

    def demand(self, sequence: Sequence, hit: PrefixHit, *, copies_block: bool) -> BlockDemand:
        # Idle blocks of the hit count as available until they are shared.
        num_extra = self._tables.pool.num_idle_among(hit.blocks) - hit.num_blocks + int(copies_block)
        return BlockDemand(
            num_now=self._tables.num_blocks_for(len(sequence.token_ids)) + num_extra,
            num_to_end=self._num_blocks_at_end(sequence) + num_extra,
        )

    def admits(self, demand: BlockDemand, *, is_first: bool) -> bool:
        num_available = self._tables.pool.num_available
        if self._reserves:
            return self.fits_to_the_end(demand)
        return demand.num_now + (0 if is_first else self._num_watermark) <= num_available

    def fits_to_the_end(self, demand: BlockDemand) -> bool:
        """Whether there is room even if this and all running sequences grow to their limits."""
        return self._num_reserved + demand.num_to_end <= self._tables.pool.num_available

    def opened(self, sequence: Sequence, table: BlockTable) -> None:
        self._num_reserved += self._num_blocks_at_end(sequence) - len(table.blocks)

    def grew(self, num_blocks: int) -> None:
        self._num_reserved -= num_blocks

    def closing(self, sequence: Sequence, table: BlockTable) -> None:
        self._num_reserved -= self._num_blocks_at_end(sequence) - len(table.blocks)

    def _num_blocks_at_end(self, sequence: Sequence) -> int:
        return self._tables.num_blocks_for(sequence.end_len - 1)  # the last token's keys and values are never needed
