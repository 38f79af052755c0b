from __future__ import annotations

import numpy as np
import pytest

from headrace.kv import BlockTable, BlockTables
from headrace.types import TokenIds

BLOCK_SIZE = 4


def make_tables(num_blocks: int = 16, *, caching: bool = True) -> BlockTables:
    return BlockTables(num_blocks=num_blocks, block_size=BLOCK_SIZE, enable_prefix_caching=caching)


def tokens(num_tokens: int, start: int = 0) -> TokenIds:
    return np.arange(start, start + num_tokens, dtype=np.int32)


def open_computed(tables: BlockTables, prompt: TokenIds) -> BlockTable:
    """A table of a prompt that is computed and findable."""
    table = tables.open(tables.find_prefix(prompt, None), len(prompt))
    tables.publish(table, prompt, len(prompt))
    return table


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_started_block_counts_whole(num_tokens: int, num_blocks: int) -> None:
    assert make_tables().num_blocks_for(num_tokens) == num_blocks


def test_a_new_table_has_room_for_its_tokens_and_not_a_block_more() -> None:
    tables = make_tables()
    table = tables.open(tables.find_prefix(tokens(9), None), 9)
    assert len(table.blocks) == 3
    assert tables.pool.num_held == 3


def test_a_computed_prompt_is_shared_in_whole_blocks() -> None:
    tables = make_tables()
    first = open_computed(tables, tokens(10))
    hit = tables.find_prefix(tokens(10), None)
    assert list(hit.blocks) == first.blocks[:2]
    second = tables.open(hit, 10)
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]
    assert tables.pool.num_held == 4


def test_what_is_not_computed_is_not_findable() -> None:
    tables = make_tables()
    table = tables.open(tables.find_prefix(tokens(12), None), 12)
    tables.publish(table, tokens(12), 7)
    assert tables.find_prefix(tokens(12), None).num_blocks == 1


def test_publishing_continues_where_it_stopped() -> None:
    tables = make_tables()
    table = tables.open(tables.find_prefix(tokens(12), None), 12)
    for num_computed in (3, 4, 9, 12):
        tables.publish(table, tokens(12), num_computed)
    assert list(tables.find_prefix(tokens(12), None).blocks) == table.blocks


def test_publishing_after_a_hit_continues_the_chain() -> None:
    tables = make_tables()
    open_computed(tables, tokens(8))
    longer = open_computed(tables, tokens(12))
    assert list(tables.find_prefix(tokens(12), None).blocks) == longer.blocks


def test_nothing_is_found_or_published_without_prefix_caching() -> None:
    tables = make_tables(caching=False)
    table = open_computed(tables, tokens(8))
    assert tables.find_prefix(tokens(8), None).blocks == ()
    tables.close(table)
    assert tables.pool.num_idle == 0


def test_a_fork_shares_the_blocks_of_its_tokens_only() -> None:
    tables = make_tables()
    table = tables.open(tables.find_prefix(tokens(12), None), 12)
    fork = tables.fork(table, 6)
    assert fork.blocks == table.blocks[:2]
    assert [tables.pool.count(block) for block in table.blocks] == [2, 2, 1]


def test_changing_a_fork_leaves_the_original_alone() -> None:
    tables = make_tables()
    table = tables.open(tables.find_prefix(tokens(6), None), 6)
    fork = tables.fork(table, 6)
    before = list(table.blocks)
    tables.make_writable(fork, 5)
    assert table.blocks == before


def test_writing_to_a_shared_block_copies_it() -> None:
    tables = make_tables()
    table = tables.open(tables.find_prefix(tokens(6), None), 6)
    fork = tables.fork(table, 6)
    copy = tables.make_writable(fork, 5)
    assert copy is not None
    assert (copy.source, copy.target) == (table.blocks[1], fork.blocks[1])
    assert copy.source != copy.target
    assert [tables.pool.count(block) for block in copy] == [1, 1]


def test_writing_to_an_own_block_copies_nothing() -> None:
    tables = make_tables()
    table = tables.open(tables.find_prefix(tokens(6), None), 6)
    assert tables.make_writable(table, 5) is None
    assert tables.pool.num_held == 2


def test_the_last_of_several_forks_keeps_the_block_without_a_copy() -> None:
    tables = make_tables()
    table = tables.open(tables.find_prefix(tokens(3), None), 3)
    fork = tables.fork(table, 3)
    tables.close(table)
    assert tables.make_writable(fork, 2) is None


def test_a_copied_published_block_stays_findable_and_its_copy_continues_the_chain() -> None:
    tables = make_tables()
    first = open_computed(tables, tokens(8))
    second = tables.open(tables.find_prefix(tokens(8), None), 8)
    tables.make_writable(second, 7)
    second.blocks += tables.pool.take(1)
    tables.publish(second, tokens(12), 12)
    assert list(tables.find_prefix(tokens(12), None).blocks) == [*first.blocks, second.blocks[2]]


def test_two_tables_that_compute_the_same_prompt_at_once_become_one_chain() -> None:
    tables = make_tables()
    hit = tables.find_prefix(tokens(8), None)
    first, second = tables.open(hit, 8), tables.open(hit, 8)
    tables.publish(first, tokens(8), 8)
    tables.publish(second, tokens(8), 8)
    assert list(tables.find_prefix(tokens(8), None).blocks) == first.blocks
    tables.close(second)
    assert tables.pool.num_idle == 0  # the duplicates are free at once


def test_closing_gives_back_every_block() -> None:
    tables = make_tables()
    table = tables.open(tables.find_prefix(tokens(12), None), 12)
    tables.close(table)
    assert tables.pool.num_available == 16
    assert table.blocks == []


def test_closed_prompts_are_evicted_oldest_first_and_from_their_end() -> None:
    tables = make_tables(num_blocks=4)
    old, new = open_computed(tables, tokens(8)), open_computed(tables, tokens(8, start=50))
    tables.close(old)
    tables.close(new)
    tables.pool.take(1)
    assert tables.find_prefix(tokens(8), None).num_blocks == 1
    assert tables.find_prefix(tokens(8, start=50), None).num_blocks == 2
    tables.pool.take(1)
    assert tables.find_prefix(tokens(8), None).num_blocks == 0
    assert tables.find_prefix(tokens(8, start=50), None).num_blocks == 2


def test_opening_with_a_hit_never_evicts_the_hit_itself() -> None:
    tables = make_tables(num_blocks=3)
    tables.close(open_computed(tables, tokens(8)))
    hit = tables.find_prefix(tokens(12), None)
    table = tables.open(hit, 12)
    assert len(set(table.blocks)) == 3
    assert tuple(table.blocks[:2]) == hit.blocks
