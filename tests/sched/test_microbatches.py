"""Plans for a pipeline: disjoint groups of sequences, balanced over the stages."""

from __future__ import annotations

import pytest

from headrace.sched import SchedulerLimits
from headrace.steps import StepPlan
from tests.sched.checking_runner import Driver, make_request


def make_driver(num_stages: int, **options: int) -> Driver:
    shape = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 256, "num_blocks": 200, "block_size": 4}
    return Driver(SchedulerLimits(**shape | options, num_stages=num_stages))  # type: ignore[arg-type]


def add(driver: Driver, num: int, *, prompt_len: int = 3, max_tokens: int = 20) -> None:
    for number in range(num):
        driver.add(make_request(f"{number}", [number + 1] * prompt_len, max_tokens=max_tokens))


def filled(driver: Driver) -> list[StepPlan]:
    """Plans until the scheduler has nothing to plan without a result."""
    plans = []
    while (plan := driver.submit()) is not None:
        plans.append(plan)
    return plans


@pytest.mark.parametrize(
    ("num_seqs", "num_stages", "sizes"), [(8, 2, [4, 4]), (7, 3, [3, 2, 2]), (4, 3, [2, 1, 1]), (1, 4, [1])]
)
def test_as_many_plans_as_stages_are_in_flight_and_hold_all_sequences_once(
    num_seqs: int, num_stages: int, sizes: list[int]
) -> None:
    driver = make_driver(num_stages)
    add(driver, num_seqs, max_tokens=100)
    plans = filled(driver)
    assert sorted((len(plan.slots) for plan in plans), reverse=True) == sizes
    assert len({slot for plan in plans for slot in plan.slots.tolist()}) == num_seqs
    for _ in range(10 * num_stages):  # each result frees its group for exactly one more plan
        driver.collect()
        assert len(filled(driver)) == 1
        assert len(driver.in_flight) == len(sizes)


def test_chunks_of_one_long_prompt_follow_each_other_without_waiting() -> None:
    driver = make_driver(2, max_num_batched_tokens=16)
    add(driver, 1, prompt_len=60)
    assert [int(plan.num_tokens[0]) for plan in filled(driver)] == [16, 16]  # one for each stage
    driver.collect()
    assert [int(plan.num_tokens[0]) for plan in filled(driver)] == [16]


def test_groups_are_balanced_again_when_sequences_have_ended() -> None:
    driver = make_driver(2)
    add(driver, 8)
    filled(driver)
    for number in range(1, 4):  # three of the first group
        driver.abort(f"{number}")
    for _ in range(4):
        driver.collect()
        filled(driver)
    assert sorted(len(step.slots) for step in driver.in_flight) == [2, 3]


def test_a_pipeline_gives_the_answers_of_one_stage() -> None:
    driver = make_driver(3, num_blocks=70)
    add(driver, 14, prompt_len=9, max_tokens=40)
    driver.drain(depth=3)
    driver.check_answers()
    driver.check_empty()
