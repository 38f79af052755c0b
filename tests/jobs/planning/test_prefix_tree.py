from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.jobs.planning.prefix_tree import MIN_GROUP_PROMPTS, Leaf, order_by_prefix, shared_len

untimed = settings(deadline=None)
BLOCK = 2

prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=30)


def leaf(tokens: list[int], **options: object) -> Leaf:
    return Leaf(np.array(tokens, np.int32).tobytes(), **options)  # type: ignore[arg-type]


def tokens_of(leaf: Leaf) -> list[int]:
    return np.frombuffer(leaf.tokens, np.int32).tolist()


def ordered(leaves: list[Leaf], decode: object = 1.0) -> list[Leaf]:
    amount = decode if callable(decode) else lambda leaf: decode
    return order_by_prefix(leaves, block_size=BLOCK, decode_tokens=amount).leaves


@untimed
@given(prompts)
def test_every_prompt_comes_once(given_prompts: list[list[int]]) -> None:
    leaves = [leaf(tokens) for tokens in given_prompts]
    made = ordered(leaves, lambda leaf: sum(tokens_of(leaf)))
    assert sorted(map(id, made)) == sorted(map(id, leaves))


@untimed
@given(prompts, st.lists(st.sampled_from([None, "a", "b"]), min_size=30, max_size=30))
def test_prompts_that_share_blocks_are_adjacent(given_prompts: list[list[int]], salts: list[str | None]) -> None:
    leaves = [leaf(tokens, salt=salt) for tokens, salt in zip(given_prompts, salts, strict=False)]
    made = ordered(leaves, lambda leaf: sum(tokens_of(leaf)))
    for length in range(BLOCK, 10, BLOCK):
        prefixes = [(each.salt, *tokens_of(each)[:length]) for each in made if len(tokens_of(each)) >= length]
        # Shorter prompts may be in between; those that are long enough form one run per prefix.
        runs = 1 + sum(one != other for one, other in pairwise(prefixes))
        assert not prefixes or runs == len(set(prefixes))


@untimed
@given(prompts)
def test_each_shared_block_is_computed_once(given_prompts: list[list[int]]) -> None:
    made = order_by_prefix([leaf(tokens) for tokens in given_prompts], block_size=BLOCK, decode_tokens=lambda leaf: 1.0)
    blocks, rest = set(), 0
    for tokens in given_prompts:
        full = len(tokens) // BLOCK * BLOCK
        blocks |= {tuple(tokens[:end]) for end in range(BLOCK, full + 1, BLOCK)}
        rest += len(tokens) - full
    assert made.num_prompt_tokens == sum(map(len, given_prompts))
    assert made.num_new_tokens == len(blocks) * BLOCK + rest


@untimed
@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12))
def test_shared_blocks_are_counted_from_the_first_token(one: list[int], other: list[int]) -> None:
    num_blocks = 0
    while (
        all(len(tokens) >= (num_blocks + 1) * BLOCK for tokens in (one, other))
        and one[: (num_blocks + 1) * BLOCK] == other[: (num_blocks + 1) * BLOCK]
    ):
        num_blocks += 1
    assert shared_len(leaf(one), leaf(other), BLOCK) == num_blocks * BLOCK


def test_prompts_with_different_salts_share_nothing() -> None:
    assert shared_len(leaf([1, 2], salt="a"), leaf([1, 2], salt="b"), BLOCK) == 0


def test_groups_with_the_most_decoding_per_prompt_token_come_first() -> None:
    read, write = [leaf([1, 1, n]) for n in range(3)], [leaf([2, 2, n]) for n in range(3)]
    made = ordered([*read, *write], lambda leaf: 50.0 if tokens_of(leaf)[0] == 2 else 1.0)
    assert {id(each) for each in made[:3]} == {id(each) for each in write}


def test_the_group_that_runs_now_continues_first() -> None:
    read, write = [leaf([1, 1, n]) for n in range(3)], [leaf([2, 2, n]) for n in range(3)]
    now = leaf([1, 1, 9], is_current=True)
    made = ordered([*read, *write, now], lambda leaf: 50.0 if tokens_of(leaf)[0] == 2 else 1.0)
    assert {id(each) for each in made[:3]} == {id(each) for each in read}
    assert len(made) == 6


def test_a_prefix_group_is_the_deepest_node_that_is_large_enough() -> None:
    large = [leaf([1, 1, 2, 2, n]) for n in range(MIN_GROUP_PROMPTS)]
    small = [leaf([1, 1, 3, 3, n]) for n in range(MIN_GROUP_PROMPTS - 1)]
    alone = leaf([4, 4, 4])
    ordered([*large, *small, alone])
    assert len({each.prefix_group for each in large}) == len({each.prefix_group for each in small}) == 1
    assert len({large[0].prefix_group, small[0].prefix_group, alone.prefix_group}) == 3
    assert alone.prefix_group == 0


def test_deeply_nested_prefixes_need_no_recursion() -> None:
    leaves = [leaf([1] * BLOCK * length) for length in range(1, 3000)]
    assert len(ordered(leaves)) == 2999
