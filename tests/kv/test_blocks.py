from __future__ import annotations

import numpy as np
import pytest

from headrace.kv import BlockPool, PrefixIndex


class Pool(BlockPool):
    """A pool of blocks of one token, whose blocks can be made findable by hand."""

    def __init__(self, num_blocks: int) -> None:
        self.prefixes = PrefixIndex(block_size=1)
        super().__init__(num_blocks, self.prefixes)

    def make_findable(self, *blocks: int) -> None:
        for block in blocks:
            self.prefixes.register("", np.array([block], np.int32), [block])


def test_a_new_pool_has_every_block_available() -> None:
    pool = Pool(3)
    assert (pool.num_available, pool.num_idle, pool.num_held) == (3, 0, 0)


def test_taken_blocks_are_distinct_and_have_one_owner() -> None:
    pool = Pool(4)
    taken = pool.take(3)
    assert len(set(taken)) == 3
    assert [pool.count(block) for block in taken] == [1, 1, 1]
    assert (pool.num_available, pool.num_held) == (1, 3)


def test_taking_no_blocks_changes_nothing() -> None:
    pool = Pool(2)
    assert pool.take(0) == []
    assert pool.num_available == 2


def test_taking_more_than_there_are_is_our_own_bug() -> None:
    pool = Pool(2)
    with pytest.raises(AssertionError, match="3 blocks asked for, 2 available"):
        pool.take(3)


def test_a_shared_block_stays_held_until_its_last_owner_drops_it() -> None:
    pool = Pool(1)
    blocks = pool.take(1)
    pool.share(blocks)
    pool.drop(blocks)
    assert pool.num_held == 1
    pool.drop(blocks)
    assert pool.num_held == 0


def test_dropping_a_block_without_owners_is_our_own_bug() -> None:
    pool = Pool(1)
    with pytest.raises(AssertionError, match="block 0 dropped more often than held"):
        pool.drop([0])


def test_a_dropped_block_that_is_findable_stays_findable() -> None:
    pool = Pool(2)
    blocks = pool.take(1)
    pool.make_findable(*blocks)
    pool.drop(blocks)
    assert (pool.num_idle, pool.num_available) == (1, 2)
    assert blocks[0] in pool.prefixes


def test_a_dropped_block_that_is_not_findable_is_free() -> None:
    pool = Pool(2)
    pool.drop(pool.take(1))
    assert (pool.num_idle, pool.num_available) == (0, 2)


def test_sharing_an_idle_block_makes_it_held() -> None:
    pool = Pool(2)
    blocks = pool.take(1)
    pool.make_findable(*blocks)
    pool.drop(blocks)
    pool.share(blocks)
    assert (pool.num_idle, pool.num_held, pool.count(blocks[0])) == (0, 1, 1)


def test_free_blocks_are_taken_before_idle_ones_are_evicted() -> None:
    pool = Pool(3)
    idle = pool.take(1)
    pool.make_findable(*idle)
    pool.drop(idle)
    assert idle[0] not in pool.take(2)
    assert pool.num_evicted == 0


def test_the_least_recently_used_sequence_is_evicted_first() -> None:
    pool = Pool(4)
    first, second = pool.take(2), pool.take(2)
    pool.make_findable(*first, *second)
    pool.drop(first)
    pool.drop(second)
    assert set(pool.take(2)) == set(first)


def test_use_makes_a_block_recent_again() -> None:
    pool = Pool(2)
    first, second = pool.take(1), pool.take(1)
    pool.make_findable(*first, *second)
    pool.drop(first)
    pool.drop(second)
    pool.share(first)
    pool.drop(first)
    assert pool.take(1) == second


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    pool = Pool(3)
    blocks = pool.take(3)
    pool.make_findable(*blocks)
    pool.drop(blocks)
    assert pool.take(3) == blocks[::-1]


def test_an_evicted_block_cannot_be_found_any_more() -> None:
    pool = Pool(1)
    blocks = pool.take(1)
    pool.make_findable(*blocks)
    pool.drop(blocks)
    pool.take(1)
    assert blocks[0] not in pool.prefixes
    assert pool.num_evicted == 1


def test_forgetting_idle_blocks_empties_the_prefix_cache_but_not_the_held_blocks() -> None:
    pool = Pool(3)
    held, idle = pool.take(1), pool.take(2)
    pool.make_findable(*held, *idle)
    pool.drop(idle)
    pool.forget_idle()
    assert (pool.num_idle, pool.num_available, pool.num_held) == (0, 2, 1)
    assert len(pool.prefixes) == 1


def test_blocks_without_an_owner_are_counted_among_others() -> None:
    pool = Pool(3)
    held, idle = pool.take(1), pool.take(1)
    pool.make_findable(*idle)
    pool.drop(idle)
    assert pool.num_idle_among([*held, *idle]) == 1


def test_every_drop_is_counted() -> None:
    pool = Pool(2)
    blocks = pool.take(2)
    num_drops = pool.num_drops
    pool.drop(blocks)
    assert pool.num_drops > num_drops
