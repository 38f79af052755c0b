from __future__ import annotations

import numpy as np

from headrace.kv import BlockTables, Chain, Tiers
from headrace.types import TokenIds
from tests.kv.fake_store import FakeStore

A, B, C, D = (bytes([letter]) * 32 for letter in b"ABCD")


def make(num_places: int, store: FakeStore | None = None) -> Tiers:
    return Tiers(num_places, Chain(), store)


def stored(tiers: Tiers, *digests: bytes, step: int = 0) -> None:
    for block, digest in enumerate(digests):
        tiers.store(block, digest)
    tiers.take_transfers(step)


def test_a_stored_block_is_loaded_from_the_place_to_which_it_was_copied() -> None:
    tiers = make(4)
    tiers.store(7, A)
    out = tiers.take_transfers(0)
    tiers.load([A], tiers.reserve(tiers.find([A, B])), [3])
    back = tiers.take_transfers(1)
    assert out is not None and back is not None
    assert (out.out_blocks.tolist(), back.in_blocks.tolist()) == ([7], [3])
    assert out.out_places.tolist() == back.in_places.tolist()


def test_what_is_stored_is_not_copied_again() -> None:
    tiers = make(4)
    stored(tiers, A)
    tiers.store(5, A)
    assert tiers.take_transfers(1) is None


def test_the_least_recently_used_block_makes_room() -> None:
    tiers = make(2)
    stored(tiers, A, B)
    tiers.store(0, A)  # used again
    stored(tiers, C, step=1)
    assert tiers.find([A]) == [A]
    assert tiers.find([B]) == []


def test_a_place_is_written_once_in_a_step() -> None:
    tiers = make(1)
    tiers.store(1, A)
    tiers.store(2, B)
    assert tiers.find([A]) == [A]
    assert tiers.stats.num_dropped == 1


def test_a_place_that_a_step_reads_is_not_reused_in_it() -> None:
    tiers = make(1)
    stored(tiers, A)
    places = tiers.reserve([A])
    tiers.store(2, B)
    tiers.load([A], places, [5])
    transfers = tiers.take_transfers(1)
    assert transfers is not None and len(transfers.out_blocks) == 0


def test_a_step_comes_after_copies_only_if_it_overwrites_or_reads_their_blocks() -> None:
    tiers = make(4)
    for is_urgent in (False, True):
        tiers.store(1, B if is_urgent else A, is_urgent=is_urgent)
        transfers = tiers.take_transfers(int(is_urgent))
        assert transfers is not None and transfers.is_urgent is is_urgent


def test_stored_blocks_are_written_to_the_disk_and_keep_their_places_meanwhile() -> None:
    store = FakeStore()
    tiers = make(2, store)
    stored(tiers, A, step=3)
    assert store.asked == [("write", A, 3)]
    stored(tiers, B, C, step=4)
    assert tiers.find([A]) == [A]
    store.end_all()
    tiers.poll()
    stored(tiers, C, D, step=5)
    assert tiers.find([A]) == []
    assert tiers.stats.num_written == 1


def test_a_full_queue_of_the_disk_costs_a_block_on_disk_and_nothing_else() -> None:
    tiers = make(2, FakeStore(has_room=False))
    stored(tiers, A)
    assert tiers.find([A]) == [A]
    stored(tiers, B, C, step=1)
    assert tiers.find([A]) == []
    assert tiers.stats.num_unwritten == 1


def test_blocks_that_a_full_queue_has_refused_are_written_later_the_newest_first() -> None:
    store = FakeStore(has_room=False)
    tiers = make(8, store)
    stored(tiers, A, B, step=3)
    stored(tiers, C, step=4)
    store.has_room = True
    tiers.poll()
    assert store.asked == [("write", C, 4), ("write", B, 3), ("write", A, 3)]
    store.end_all()
    tiers.poll()
    assert (tiers.stats.num_written, tiers.stats.num_unwritten) == (3, 0)
    assert not tiers.is_writing


def test_blocks_from_the_disk_are_found_once_they_have_arrived() -> None:
    store = FakeStore(A, B)
    tiers = make(4, store)
    fetch = tiers.fetch([A, B, C], now=0.0, max_reads=9)
    assert not fetch.is_over
    assert (fetch.num_found, tiers.num_reads_before(fetch)) == (2, 2)
    assert tiers.find([A]) == []
    store.end_all()
    tiers.poll()
    assert fetch.is_over
    assert tiers.find([A, B, C]) == [A, B]


def test_no_more_blocks_are_read_than_was_asked_for() -> None:
    store = FakeStore(A, B, C)
    tiers = make(8, store)
    tiers.fetch([B], now=0.0, max_reads=1)
    assert tiers.num_on_disk([A, B, C, D]) == 2  # B is on its way
    fetch = tiers.fetch([A, B, C], now=0.0, max_reads=1)
    assert fetch.pending == {A, B} and tiers.num_reads_before(fetch) == 2


def test_two_prompts_wait_for_the_same_file() -> None:
    store = FakeStore(A)
    tiers = make(4, store)
    fetches = [tiers.fetch([A], now=0.0, max_reads=9) for _ in range(2)]
    assert len(store.asked) == 1
    store.end_all()
    tiers.poll()
    assert all(fetch.is_over for fetch in fetches)


def test_a_file_that_cannot_be_read_frees_its_place() -> None:
    store = FakeStore(A)
    tiers = make(2, store)
    fetch = tiers.fetch([A], now=0.0, max_reads=9)
    store.end_all(is_good=False)
    tiers.poll()
    assert fetch.is_over and tiers.find([A]) == []
    assert (tiers.num_places_used, tiers.stats.num_unreadable) == (0, 1)


def test_a_file_is_read_after_the_last_copies_of_its_place() -> None:
    store = FakeStore(D)
    tiers = make(1, store)
    stored(tiers, A, step=5)
    store.end_all()
    tiers.poll()
    tiers.fetch([D], now=0.0, max_reads=9)
    assert store.asked == [("read", D, 5)]


def test_forgetting_empties_all_tiers_also_of_what_is_being_written() -> None:
    store = FakeStore(C)
    tiers = make(4, store)
    stored(tiers, A)
    tiers.fetch([C], now=0.0, max_reads=9)
    tiers.clear()
    store.end_all()
    tiers.poll()
    assert tiers.find([A]) == tiers.find([C]) == []
    assert tiers.num_places_used == 0


# ---- with a pool

SIZE = 4


def tokens(start: int) -> TokenIds:
    return np.arange(start, start + 2 * SIZE, dtype=np.int32)


def computed(tables: BlockTables, prompt: TokenIds) -> None:
    """Compute a prompt of two blocks, and end it."""
    table = tables.open(tables.find_prefix(prompt, None), len(prompt))
    tables.publish(table, prompt, len(prompt))
    tables.close(table)


def with_pool(num_blocks: int, num_clean: int) -> tuple[BlockTables, Tiers]:
    tiers = make(16)
    return BlockTables(
        num_blocks=num_blocks, block_size=SIZE, enable_prefix_caching=True, tiers=tiers, num_clean=num_clean
    ), tiers


def test_idle_blocks_are_copied_before_they_are_needed_and_stay_findable() -> None:
    tables, tiers = with_pool(num_blocks=6, num_clean=4)
    computed(tables, tokens(0))
    tables.pool.clean()
    assert tiers.take_transfers(0) is None  # four blocks are free
    computed(tables, tokens(100))
    tables.pool.clean()
    transfers = tiers.take_transfers(1)
    assert transfers is not None and len(transfers.out_blocks) == 2 and not transfers.is_urgent
    assert tables.find_prefix(tokens(0), None).num_blocks == 2
    tables.pool.take(4)
    assert tiers.take_transfers(2) is None  # nothing to copy when they are evicted
    assert len(tables.stored_after(tables.find_prefix(tokens(0), None), tokens(0))) == 2


def test_a_block_that_is_evicted_without_having_been_copied_is_copied_first() -> None:
    tables, tiers = with_pool(num_blocks=2, num_clean=0)
    computed(tables, tokens(0))
    tables.pool.take(1)
    transfers = tiers.take_transfers(0)
    assert transfers is not None and transfers.is_urgent and len(transfers.out_blocks) == 1


def test_an_empty_prefix_cache_is_empty_in_all_tiers() -> None:
    tables, _ = with_pool(num_blocks=4, num_clean=4)
    computed(tables, tokens(0))
    tables.pool.clean()
    tables.pool.forget_idle()
    hit = tables.find_prefix(tokens(0), None)
    assert hit.num_blocks == 0 and tables.stored_after(hit, tokens(0)) == []
    assert tables.pool.num_available == 4
