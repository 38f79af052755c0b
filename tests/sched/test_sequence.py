from __future__ import annotations

from headrace.sched.sequence import sequence_seed


def test_the_first_sequence_of_a_request_has_the_seed_of_the_request() -> None:
    assert [sequence_seed(seed, 0) for seed in (0, 17, -4)] == [0, 17, -4]


def test_sequence_seeds_do_not_meet_across_near_requests() -> None:
    seeds = {sequence_seed(seed, index) for seed in range(-50, 50) for index in range(20)}
    assert len(seeds) == 100 * 20
    assert all(-50 <= seed < 2**64 for seed in seeds)
