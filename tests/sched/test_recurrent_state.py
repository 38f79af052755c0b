"""Slots with a recurrent state: every token of a sequence is computed in its own slot, in order, from the first on."""

from __future__ import annotations

import msgspec

from headrace.steps import StepPlan
from tests.sched.checking_runner import Driver, make_request
from tests.sched.test_scheduler import make_driver


def all_plans(driver: Driver, depth: int = 1) -> list[StepPlan]:
    """Runs to the end, one step ahead of the results, and checks the answers."""
    plans = []
    while driver.scheduler.has_unfinished or driver.in_flight:
        plan = driver.step(depth)
        plans += [] if plan is None else [plan]
    driver.check_answers()
    driver.check_empty()
    return plans


def starts_at_zero(plans: list[StepPlan]) -> bool:
    entries = [entry for plan in plans for entry in plan.slot_entries]
    return all(entry.num_computed == 0 for entry in entries) and not any(plan.copies for plan in plans)


def test_equal_prompts_are_computed_each_even_if_a_request_asks_to_share_blocks() -> None:
    driver = make_driver(has_recurrent_state=True)
    for name in ("one", "two"):
        request = make_request(name, range(20), max_tokens=4, cache_salt="of a beam search")
        driver.add(msgspec.structs.replace(request, shares_blocks=True))
        assert starts_at_zero(all_plans(driver))
    assert driver.scheduler.stats.num_prefix_hit_tokens == 0


def test_the_answers_to_one_prompt_compute_it_each() -> None:
    driver = make_driver(has_recurrent_state=True)
    driver.add(make_request("one", range(10), max_tokens=4, n=3))
    plans = all_plans(driver)
    assert starts_at_zero(plans)
    assert sum(plan.num_batched_tokens for plan in plans) == 3 * (10 + 3)


def test_a_preempted_sequence_is_computed_again_from_its_first_token() -> None:
    driver = make_driver(has_recurrent_state=True, num_blocks=10)
    for name in ("one", "two", "three"):
        driver.add(make_request(name, range(8), max_tokens=20), stop_token_ids=(10**6,))
    assert starts_at_zero(all_plans(driver))
    assert driver.scheduler.stats.num_preemptions > 0
