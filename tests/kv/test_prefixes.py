from __future__ import annotations

import copy

import numpy as np
import pytest

from headrace.kv import PrefixIndex
from headrace.types import TokenIds


class SameHash(str):
    """Text that collides with every other of its kind."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 1


def tokens(*ids: int) -> TokenIds:
    return np.array(ids, np.int32)


def register(index: PrefixIndex, prompt: TokenIds, blocks: list[int], salt: str = "") -> None:
    """Make a prompt of whole blocks (of two tokens) findable."""
    index.register(salt, prompt, blocks)


def test_an_empty_index_finds_nothing() -> None:
    hit = PrefixIndex(2).find(tokens(1, 2, 3, 4), None)
    assert hit.blocks == ()


def test_the_longest_cached_prefix_is_found_in_order() -> None:
    index = PrefixIndex(2)
    register(index, tokens(1, 2, 3, 4), [7, 5])
    assert index.find(tokens(1, 2, 3, 4, 9, 9), None).blocks == (7, 5)
    assert index.find(tokens(1, 2, 9, 9), None).blocks == (7,)


def test_only_full_blocks_are_found() -> None:
    index = PrefixIndex(2)
    register(index, tokens(1, 2, 3, 4), [7, 5])
    assert index.find(tokens(1, 2, 3), None).blocks == (7,)
    assert index.find(tokens(1), None).blocks == ()


def test_a_hit_has_the_entry_of_its_last_block() -> None:
    index = PrefixIndex(2)
    register(index, tokens(1, 2), [7])
    hit = index.find(tokens(1, 2, 3, 4), None)
    index.register(hit.last_entry, tokens(3, 4), [8])
    assert index.find(tokens(1, 2, 3, 4), None).blocks == (7, 8)


def test_a_miss_starts_a_chain_from_the_salt() -> None:
    index = PrefixIndex(2)
    index.register(index.find(tokens(1, 2), "tenant").last_entry, tokens(1, 2), [7])
    assert index.find(tokens(1, 2), "tenant").blocks == (7,)
    assert index.find(tokens(1, 2), None).blocks == ()


def test_equal_tokens_after_different_prefixes_are_different_blocks() -> None:
    index = PrefixIndex(2)
    register(index, tokens(1, 2, 8, 8), [0, 1])
    register(index, tokens(3, 4, 8, 8), [2, 3])
    assert index.find(tokens(1, 2, 8, 8), None).blocks == (0, 1)
    assert index.find(tokens(3, 4, 8, 8), None).blocks == (2, 3)


def test_the_middle_of_a_prompt_is_not_the_prefix_of_another() -> None:
    index = PrefixIndex(2)
    register(index, tokens(1, 2, 8, 8), [0, 1])
    assert index.find(tokens(8, 8), None).blocks == ()


def test_the_middle_of_a_cached_prompt_is_not_found_once_its_prefix_is_forgotten() -> None:
    index = PrefixIndex(2)
    register(index, tokens(1, 2, 3, 4), [0, 1])
    index.forget(0)
    assert index.find(tokens(1, 2, 3, 4), None).blocks == ()
    register(index, tokens(1, 2), [5])  # as another entry: what followed the old one may be anything
    assert index.find(tokens(1, 2, 3, 4), None).blocks == (5,)


def test_prompts_share_blocks_only_under_the_same_salt() -> None:
    index = PrefixIndex(2)
    register(index, tokens(1, 2), [0], salt="one")
    register(index, tokens(1, 2), [1], salt="other")
    assert index.find(tokens(1, 2), "one").blocks == (0,)
    assert index.find(tokens(1, 2), "other").blocks == (1,)
    assert index.find(tokens(1, 2), None).blocks == ()


def test_salts_whose_hashes_collide_do_not_share() -> None:
    index = PrefixIndex(2)
    register(index, tokens(1, 2), [0], salt=SameHash("one"))
    assert hash(SameHash("one")) == hash(SameHash("other"))
    assert index.find(tokens(1, 2), SameHash("other")).blocks == ()
    assert index.find(tokens(1, 2), SameHash("one")).blocks == (0,)


def test_parents_whose_hashes_collide_do_not_share() -> None:
    index = PrefixIndex(2)
    register(index, tokens(1, 2, 8, 8), [0, 1])
    first = index.find(tokens(1, 2), None).last_entry
    assert isinstance(first, int)
    collides = first + 2**61 - 1  # Python's hash of an integer is its remainder by this prime
    assert hash(collides) == hash(first)
    index.register(collides, tokens(9, 9), [2])
    assert index.find(tokens(1, 2, 9, 9), None).blocks == (0,)
    assert index.register(collides, tokens(8, 8), [3]) != index.find(tokens(1, 2, 8, 8), None).last_entry


def test_token_bytes_that_look_alike_at_another_offset_do_not_share() -> None:
    index = PrefixIndex(2)
    register(index, tokens(1, 0), [0])
    assert index.find(tokens(0, 1), None).blocks == ()
    assert index.find(tokens(256, 0), None).blocks == ()


def test_registering_an_equal_block_keeps_the_first_and_its_chain() -> None:
    index = PrefixIndex(2)
    first = index.register("", tokens(1, 2), [0])
    assert index.register("", tokens(1, 2), [1]) == first
    assert 1 not in index
    assert index.find(tokens(1, 2), None).blocks == (0,)


def test_a_block_under_two_prefixes_is_our_own_bug() -> None:
    index = PrefixIndex(2)
    index.register("", tokens(1, 2), [0])
    with pytest.raises(AssertionError, match="block 0 is findable under another prefix"):
        index.register("", tokens(3, 4), [0])


def test_a_forgotten_block_can_hold_something_else() -> None:
    index = PrefixIndex(2)
    index.register("", tokens(1, 2), [0])
    index.forget(0)
    index.register("", tokens(3, 4), [0])
    assert index.find(tokens(3, 4), None).blocks == (0,)
    assert index.find(tokens(1, 2), None).blocks == ()
    assert len(index) == 1


def test_forgetting_an_unknown_block_changes_nothing() -> None:
    index = PrefixIndex(2)
    register(index, tokens(1, 2), [0])
    index.forget(3)
    assert len(index) == 1


def test_what_was_found_before_is_found_again_until_it_is_forgotten() -> None:
    index = PrefixIndex(2)
    register(index, tokens(1, 2, 3, 4, 5, 6), [0, 1, 2])
    assert index.find(tokens(1, 2, 3, 4, 5, 6), None).blocks == (0, 1, 2)
    assert index.find(tokens(1, 2, 3, 4, 9, 9), None).blocks == (0, 1)
    assert index.find(tokens(1, 2, 3, 4, 5, 6), None).blocks == (0, 1, 2)
    assert index.find(tokens(1, 2, 3), None).blocks == (0,)
    index.find(tokens(1, 2, 3, 4, 5, 6), None)
    index.forget(1)
    assert index.find(tokens(1, 2, 3, 4, 5, 6), None).blocks == (0,)


def test_the_memory_of_the_last_lookup_changes_no_result() -> None:
    """Against a copy of the index that has forgotten its last lookup, while blocks are registered and forgotten."""
    random = np.random.default_rng(0)
    index = PrefixIndex(2)
    free, registered = list(range(64)), {}
    for _ in range(3000):
        prompt = random.integers(0, 2, 2 * random.integers(1, 6)).astype(np.int32)
        salt = "ab"[random.integers(2)]
        fresh = copy.deepcopy(index)
        fresh.find(tokens(), None)  # nothing in common with any prompt
        hit = index.find(prompt, salt)
        assert hit == fresh.find(prompt, salt)
        if random.random() < 0.5 and len(free) > 6:
            rest = prompt[2 * hit.num_blocks :]
            blocks = [free.pop() for _ in range(len(rest) // 2)]
            index.register(hit.last_entry, rest, blocks)
            registered.update(dict.fromkeys(blocks))
        elif registered and random.random() < 0.7:
            block = list(registered)[random.integers(len(registered))]
            del registered[block]
            index.forget(block)
            free.append(block)
