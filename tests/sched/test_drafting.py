from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.sched import SchedulerLimits
from headrace.speculation import Speculation, SpeculativeConfig
from headrace.types import TokenIds
from tests.sched.checking_runner import NEVER_SAMPLED, Driver, decode_alone, make_request


def driver(
    *, num_tokens: int = 4, max_seqs: int = 4, free_rows: float = 100.0, num_blocks: int = 64, **waiting: Any
) -> Driver:
    config = SpeculativeConfig(method="ngram", num_tokens=num_tokens)
    speculation = Speculation(config=config, max_seqs=max_seqs, max_rows=64, free_rows=free_rows, **waiting)
    limits = SchedulerLimits(
        max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128, num_blocks=num_blocks, speculation=speculation
    )
    return Driver(limits, stop_token_ids=(NEVER_SAMPLED,))


def right(tokens: TokenIds, num_tokens: int) -> TokenIds:
    return np.array(decode_alone(tokens.tolist(), seed=0, end_len=len(tokens) + num_tokens), np.int32)


def wrong(tokens: TokenIds, num_tokens: int) -> TokenIds:
    return np.full(num_tokens, 10**5, np.int32)


def nothing(tokens: TokenIds, num_tokens: int) -> TokenIds:
    return np.empty(0, np.int32)


def run(driver: Driver, look_up: object, *, num_requests: int = 1, max_tokens: int = 60) -> list[int]:
    """Run to the end; returns the number of drafts in each step."""
    assert driver.scheduler.drafting is not None
    driver.scheduler.drafting.look_up = look_up  # type: ignore[assignment]
    for number in range(num_requests):
        driver.add(make_request(f"{number}", [1, 2, number], max_tokens=max_tokens))
    plans = []
    while driver.scheduler.has_unfinished or driver.in_flight:
        plan = driver.step(depth=2)
        plans += [] if plan is None else [plan]
    driver.check_answers()
    driver.check_empty()
    return [0 if plan.drafts is None else int(plan.drafts.lens.sum()) for plan in plans]


def test_right_drafts_take_a_fifth_of_the_steps() -> None:
    engine = driver(num_tokens=4)
    drafted = run(engine, right, max_tokens=61)
    assert drafted == [0] + [4] * 12
    stats = engine.scheduler.stats
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (12, 48, 48)
    assert stats.accepted_by_position.counts == (12,) * 4
    assert stats.num_generated_tokens == 61


def test_drafts_become_fewer_where_they_are_rejected_and_are_tried_again_later() -> None:
    drafted = run(driver(free_rows=3.0), wrong, max_tokens=100)
    assert drafted[1] == 4
    gave_up = drafted.index(0, 1)
    assert gave_up < 10 and any(drafted[gave_up:])
    assert sum(drafted) < 50


def test_a_new_sequence_drafts_as_much_as_others_before_it_had_accepted() -> None:
    engine = driver(free_rows=3.0)
    before = sum(run(engine, right, max_tokens=60)[:3])
    for _ in range(6):
        run(engine, wrong, max_tokens=60)
    after = sum(run(engine, wrong, max_tokens=60)[:3])
    assert before == 8 and after <= 2
    for _ in range(20):  # what was rejected is forgotten, and drafts are tried again
        run(engine, nothing, max_tokens=60)
    assert sum(run(engine, right, max_tokens=60)[:3]) == 8


def test_nothing_looks_up_what_could_not_pay() -> None:
    engine = driver(wait_cost=3.0)
    run(engine, lambda tokens, num_tokens: pytest.fail("looked up"), max_tokens=40)
    assert engine.scheduler.stats.num_drafts == 0


def test_nothing_waits_for_a_lookup_that_finds_nothing() -> None:
    engine = driver(wait_cost=0.1)
    num_lookups = 0

    def counted(tokens: TokenIds, num_tokens: int) -> TokenIds:
        nonlocal num_lookups
        num_lookups += 1
        return nothing(tokens, num_tokens)

    assert engine.scheduler.drafting is not None
    engine.scheduler.drafting.look_up = counted
    engine.add(make_request("0", [1, 2, 3], max_tokens=100))
    plans = [engine.step(depth=2) for _ in range(100)]
    assert None not in plans  # each step is submitted while two others are in flight
    engine.drain()
    assert 20 < num_lookups < 40
    engine.check_answers()


def test_drafts_that_gain_less_than_a_step_ahead_are_not_made() -> None:
    """Four drafts at the first acceptance of 0.8 are expected to gain 2.4 tokens; they cost 4 / 101."""
    assert sum(run(driver(wait_cost=2.3), right, max_tokens=20)) > 0
    assert sum(run(driver(wait_cost=2.4), right, max_tokens=20)) == 0


def test_waiting_costs_fewer_tokens_where_steps_take_longer_by_their_rows() -> None:
    """A step of eight sequences takes 15 / 8 times one of a single sequence, and gives eight tokens."""
    config = SpeculativeConfig(method="ngram")
    found = Speculation(config=config, max_seqs=8, max_rows=64, free_rows=7.0, wait_cost=0.5)
    assert found.waiting_tokens(1) == pytest.approx(0.5)
    assert found.waiting_tokens(8) == pytest.approx(0.5 * 8 * 8 / 15)


def test_nothing_is_drafted_for_more_sequences_than_the_limit() -> None:
    assert sum(run(driver(max_seqs=2), right, num_requests=3, max_tokens=20)) == 0
    assert sum(run(driver(max_seqs=3), right, num_requests=3, max_tokens=20)) > 0


def test_the_more_sequences_run_the_fewer_drafts_pay() -> None:
    """With 8 free rows and the first assumed acceptance of 0.8: 0.8 ** 4 > 1 / 9, and 0.8 ** 3 > 4 / 12 > 0.8 ** 5."""
    assert max(run(driver(free_rows=8.0, num_tokens=8), right)) == 8
    assert run(driver(free_rows=8.0, num_tokens=8), right, num_requests=4)[1] == 4 * 4


def test_drafts_end_where_the_answer_does() -> None:
    assert run(driver(num_tokens=8), right, max_tokens=4) == [0, 2]


def test_drafts_are_left_out_where_the_cache_has_no_blocks_for_them() -> None:
    engine = driver(num_blocks=1)  # of 16 tokens
    assert run(engine, right, max_tokens=14) == [0, 4, 4, 2]
    assert engine.scheduler.stats.num_preemptions == 0
