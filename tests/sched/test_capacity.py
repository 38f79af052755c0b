from __future__ import annotations

import numpy as np

from headrace.config import CapacityPolicy
from headrace.kv import BlockTable, BlockTables
from headrace.sched.capacity import Capacity
from headrace.sched.sequence import Sequence
from headrace.types import Request, SamplingParams

BLOCK_SIZE = 4


class Cache:
    """A capacity over its tables, with the scheduler's order of calls."""

    def __init__(self, num_blocks: int, policy: CapacityPolicy) -> None:
        self.tables = BlockTables(num_blocks=num_blocks, block_size=BLOCK_SIZE, enable_prefix_caching=True)
        self.capacity = Capacity(self.tables, policy)

    def admits(self, sequence: Sequence, *, is_first: bool = False, copies_block: bool = False) -> bool:
        hit = self.tables.find_prefix(sequence.token_ids, None)
        return self.capacity.admits(self.capacity.demand(sequence, hit, copies_block=copies_block), is_first=is_first)

    def open(self, sequence: Sequence) -> BlockTable:
        hit = self.tables.find_prefix(sequence.token_ids, None)
        table = self.tables.open(hit, len(sequence.token_ids))
        self.capacity.opened(sequence, table)
        self.tables.publish(table, sequence.token_ids, len(sequence.token_ids))
        return table

    def grow(self, table: BlockTable) -> None:
        table.blocks += self.tables.pool.take(1)
        self.capacity.grew(1)

    def close(self, sequence: Sequence, table: BlockTable) -> None:
        self.capacity.closing(sequence, table)
        self.tables.close(table)


def make_sequence(prompt_len: int, end_len: int, start: int = 0) -> Sequence:
    prompt = np.arange(start, start + prompt_len, dtype=np.int32)
    return Sequence(
        request=Request("request", prompt, SamplingParams()),
        index=0,
        seed=0,
        arrival=0,
        end_len=end_len,
        stop_token_ids=(),
        token_ids=prompt,
    )


def test_max_utilization_admits_what_fits_now_whatever_it_grows_to() -> None:
    cache = Cache(4, "max_utilization")
    cache.open(make_sequence(8, 17))
    assert cache.admits(make_sequence(8, 17, start=50))
    assert not cache.admits(make_sequence(9, 17, start=50))


def test_guaranteed_no_evict_admits_only_what_can_finish() -> None:
    cache = Cache(4, "guaranteed_no_evict")
    assert cache.admits(make_sequence(4, 17))
    assert not cache.admits(make_sequence(4, 18))


def test_guaranteed_no_evict_keeps_what_running_sequences_still_need() -> None:
    cache = Cache(6, "guaranteed_no_evict")
    cache.open(make_sequence(4, 17))  # holds one block, needs four at its end
    assert cache.admits(make_sequence(4, 9, start=50))
    assert not cache.admits(make_sequence(4, 10, start=50))


def test_a_reserved_block_that_is_taken_is_not_reserved_twice() -> None:
    cache = Cache(6, "guaranteed_no_evict")
    table = cache.open(make_sequence(4, 17))
    cache.grow(table)
    assert cache.admits(make_sequence(4, 9, start=50))
    assert not cache.admits(make_sequence(4, 10, start=50))


def test_an_end_gives_back_what_was_held_and_what_was_reserved() -> None:
    cache = Cache(4, "guaranteed_no_evict")
    sequence = make_sequence(4, 17)
    cache.close(sequence, cache.open(sequence))
    assert cache.admits(make_sequence(4, 17, start=50))


def test_the_last_token_needs_no_position() -> None:
    cache = Cache(2, "guaranteed_no_evict")
    assert cache.admits(make_sequence(4, 9))
    assert not cache.admits(make_sequence(4, 10))


def test_blocks_of_a_hit_that_others_hold_cost_nothing() -> None:
    cache = Cache(4, "max_utilization")
    cache.open(make_sequence(12, 13))
    assert cache.admits(make_sequence(16, 17))  # three blocks are shared, one is new
    assert not cache.admits(make_sequence(16, 17, start=50))


def test_idle_blocks_of_a_hit_count_as_taken_by_it() -> None:
    cache = Cache(4, "max_utilization")
    sequence = make_sequence(12, 13)
    cache.close(sequence, cache.open(sequence))
    hit = cache.tables.find_prefix(sequence.token_ids, None)
    assert hit.num_blocks == 3
    assert cache.capacity.demand(sequence, hit, copies_block=False).num_now == 3


def test_a_copy_on_write_costs_a_block() -> None:
    cache = Cache(3, "max_utilization")
    cache.open(make_sequence(12, 13))
    assert cache.admits(make_sequence(12, 13))
    assert not cache.admits(make_sequence(12, 13), copies_block=True)


def test_a_watermark_is_left_for_growth_except_by_the_only_sequence() -> None:
    cache = Cache(200, "max_utilization")  # one per cent: two blocks
    assert cache.admits(make_sequence(198 * BLOCK_SIZE, 199 * BLOCK_SIZE))
    assert not cache.admits(make_sequence(199 * BLOCK_SIZE, 200 * BLOCK_SIZE))
    assert cache.admits(make_sequence(199 * BLOCK_SIZE, 200 * BLOCK_SIZE), is_first=True)
