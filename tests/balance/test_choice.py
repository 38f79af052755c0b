"""The choice of a replica: properties that hold for any loads, scores and prefixes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from headrace.balance.choice import (
    LOAD_SLACK,
    Candidate,
    choose,
    choose_in_turn,
    is_worth_it,
    load_limit,
)

NUM_CHUNKS = 20
candidates = st.lists(
    st.builds(
        Candidate,
        load=st.integers(0, 200).map(float),
        num_pending=st.integers(0, 20),
        score=st.floats(0.0, 1.0),
        num_matched=st.integers(0, NUM_CHUNKS),
    ),
    min_size=1,
    max_size=8,
)


@given(candidates, st.integers(0, 100))
def test_a_prefix_is_followed_while_the_load_is_bounded(found: list[Candidate], turn: int) -> None:
    choice = choose(found, NUM_CHUNKS, turn=turn)
    limit = load_limit(min(each.weighted_load for each in found))
    holders = [each for each in found if is_worth_it(each.num_matched, NUM_CHUNKS)]
    fitting = [each for each in holders if each.weighted_load <= limit]
    chosen = found[choice.index]
    if fitting:
        assert choice.reason == "prefix" and chosen in fitting
        assert chosen.num_matched == max(each.num_matched for each in fitting)
        assert chosen.cost == min(each.cost for each in fitting if each.num_matched == chosen.num_matched)
    else:
        assert choice.reason == ("spill" if holders else "load")
        assert chosen.cost == min(each.cost for each in found)


@given(candidates, st.integers(0, 100))
def test_a_healthier_replica_is_not_chosen_less(found: list[Candidate], turn: int) -> None:
    choice = choose(found, NUM_CHUNKS, turn=turn)
    chosen = found[choice.index]
    better = [*found]
    better[choice.index] = replace(chosen, score=1.0)
    again = choose(better, NUM_CHUNKS, turn=turn)
    assert again.index == choice.index or again.reason == "prefix"


def test_a_prefix_gives_way_to_load() -> None:
    def chosen(load: float) -> int:
        return choose([Candidate(load, num_matched=20), Candidate(0.0)], NUM_CHUNKS).index

    assert [chosen(0.0), chosen(LOAD_SLACK), chosen(LOAD_SLACK + 1)] == [0, 0, 1]


def test_a_second_holder_is_better_than_the_least_loaded_replica() -> None:
    found = [Candidate(50.0, num_matched=20), Candidate(12.0, num_matched=10), Candidate(10.0)]
    assert choose(found, NUM_CHUNKS).index == 1


def test_a_small_part_of_the_prompt_moves_nothing() -> None:
    assert choose([Candidate(1.0, num_matched=4), Candidate(0.0)], NUM_CHUNKS).index == 1
    assert choose([Candidate(1.0, num_matched=5), Candidate(0.0)], NUM_CHUNKS).index == 0


def test_requests_that_wait_for_their_first_token_weigh_more() -> None:
    assert choose([Candidate(2.0, num_pending=1), Candidate(8.0)], 0).index == 1
    assert choose([Candidate(2.0, num_pending=1), Candidate(10.0)], 0).index == 0


def test_equal_replicas_take_turns() -> None:
    found = [Candidate(0.0)] * 3
    assert Counter(choose(found, 0, turn=turn).index for turn in range(9)) == {0: 3, 1: 3, 2: 3}


def test_a_bad_score_counts_as_load() -> None:
    assert choose([Candidate(2.0, score=0.5), Candidate(4.0)], 0).index == 1


def test_round_robin_goes_around() -> None:
    assert [choose_in_turn(3, turn).index for turn in range(4)] == [0, 1, 2, 0]
