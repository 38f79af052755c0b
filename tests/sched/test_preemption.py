"""A KV cache that turns out too small: which sequence is preempted, and that no token is lost."""

from __future__ import annotations

import pytest

from headrace.sched import SchedulerLimits
from headrace.steps import SlotEntry, StepPlan
from tests.sched.checking_runner import NEVER_SAMPLED, Driver, make_request


def make_driver(num_blocks: int, **options: object) -> Driver:
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 4, **options}
    limits = SchedulerLimits(num_blocks=num_blocks, **values)  # type: ignore[arg-type]
    return Driver(limits, stop_token_ids=(NEVER_SAMPLED,))


def slot_entries(driver: Driver, depth: int = 0) -> list[SlotEntry]:
    """Drain; returns all slot entries."""
    entered: list[SlotEntry] = []
    for _ in range(500):
        if not driver.scheduler.has_unfinished:
            return entered
        plan = driver.step(depth)
        entered += plan.slot_entries if plan else ()
    raise AssertionError("not finished after 500 steps")


def step_until_preemption(driver: Driver) -> StepPlan | None:
    for _ in range(500):
        plan = driver.step()
        if driver.scheduler.stats.num_preemptions:
            return plan
    raise AssertionError("no preemption in 500 steps")


def add_pair(driver: Driver, **options: object) -> None:
    """Two that fit together at first (a block each) but not in the end (four each)."""
    for seed, name in enumerate(("old", "young")):
        driver.add(make_request(name, range(10 * seed, 10 * seed + 4), max_tokens=13, **options), seeds=(seed,))


def test_the_youngest_is_preempted() -> None:
    driver = make_driver(num_blocks=5)
    add_pair(driver)
    seeds = [entry.seed for entry in slot_entries(driver)]
    assert seeds == [0, 1, 1]
    driver.check_answers()


def test_under_the_priority_policy_the_least_urgent_is_preempted() -> None:
    driver = make_driver(num_blocks=5, queue_policy="priority")
    driver.add(make_request("old", range(4), max_tokens=13, priority=1), seeds=(0,))
    driver.add(make_request("young", range(10, 14), max_tokens=13, priority=0), seeds=(1,))
    seeds = [entry.seed for entry in slot_entries(driver)]
    assert sorted(seeds[:2]) == [0, 1]
    assert seeds[2:] == [0]
    driver.check_answers()


def first_answer_tokens(driver: Driver, name: str, *, depth: int = 0) -> int:
    """Steps until a request has a token."""
    for number in range(1, 200):
        driver.step(depth)
        if (name, 0) in driver.answers and driver.answers[name, 0].token_ids:
            return number
    raise AssertionError(f"{name} has no token after 200 steps")


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("options", [{"max_num_seqs": 2}, {"num_blocks": 14}, {"min_free_slots_to_start": 4}])
def test_an_urgent_request_preempts_a_less_urgent_one(depth: int, options: dict[str, int]) -> None:
    """It needs a slot, or blocks, or would wait for more free slots."""
    driver = make_driver(**{"num_blocks": 64, **options}, queue_policy="priority")
    for number in range(2):
        request = make_request(f"batch-{number}", range(20 * number, 20 * number + 12), max_tokens=40, priority=9)
        driver.add(request, seeds=(number,))
    driver.step(depth)
    driver.step(depth)
    driver.add(make_request("urgent", range(50, 60), max_tokens=4, watched=True), seeds=(7,))
    assert first_answer_tokens(driver, "urgent", depth=depth) <= depth + 3
    driver.drain(depth=depth)
    driver.check_answers()
    driver.check_empty()


def test_less_urgent_sequences_pause_while_an_urgent_prompt_is_computed() -> None:
    driver = make_driver(num_blocks=64, max_num_batched_tokens=8, queue_policy="priority")
    driver.add(make_request("batch", range(4), max_tokens=30, priority=9), seeds=(0,))
    driver.step()
    driver.step()
    driver.add(make_request("urgent", range(50, 66), max_tokens=3), seeds=(1,))
    sizes = [plan.num_batched_tokens for plan in (driver.step(), driver.step(), driver.step()) if plan is not None]
    assert sizes == [8, 8, 2]  # its prompt in two chunks, then both decode
    driver.drain()
    driver.check_answers()


@pytest.mark.parametrize("priority", [0, -1])
def test_requests_that_are_no_less_urgent_are_not_preempted(priority: int) -> None:
    driver = make_driver(num_blocks=64, max_num_seqs=1, queue_policy="priority")
    driver.add(make_request("running", range(4), max_tokens=20, priority=priority), seeds=(0,))
    driver.step()
    driver.add(make_request("waiting", range(10, 14), max_tokens=2), seeds=(1,))
    driver.drain()
    assert driver.scheduler.stats.num_preemptions == 0
    driver.check_answers()


def test_an_urgent_prompt_does_not_wait_for_the_prompts_of_others() -> None:
    driver = make_driver(num_blocks=64, max_num_batched_tokens=8, max_model_len=128, queue_policy="priority")
    driver.add(make_request("batch", range(60), max_tokens=2, priority=9), seeds=(0,))
    driver.step()
    driver.add(make_request("urgent", range(70, 76), max_tokens=2, watched=True), seeds=(1,))
    assert first_answer_tokens(driver, "urgent") == 1
    driver.drain()
    driver.check_answers()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_preempted_sequence_comes_back_with_all_the_tokens_it_had(depth: int) -> None:
    driver = make_driver(num_blocks=5)
    add_pair(driver)
    *_, back = slot_entries(driver, depth)
    answer_so_far = back.token_ids[back.prompt_len :].tolist()
    assert answer_so_far
    assert answer_so_far == driver.expected("young")[: len(answer_so_far)]
    driver.check_answers()
    driver.check_empty()


def test_a_preempted_sequence_delivers_no_token_twice() -> None:
    driver = make_driver(num_blocks=5)
    add_pair(driver, watched=True, logprobs=1)
    driver.drain(depth=2)
    assert driver.scheduler.stats.num_preemptions > 0
    driver.check_answers()
    assert driver.answers["young", 0].num_events == 13
    assert [entry.token_id for entry in driver.answers["young", 0].logprobs] == driver.expected("young")


def test_a_preempted_sequence_is_announced_once() -> None:
    driver = make_driver(num_blocks=5)
    add_pair(driver, announced=True)
    driver.drain(depth=1)
    assert driver.scheduler.stats.num_preemptions > 0
    assert driver.answers["young", 0].num_events == 2
    driver.check_answers()


def test_a_preempted_sequence_keeps_its_place_before_those_that_came_later() -> None:
    driver = make_driver(num_blocks=5)
    add_pair(driver)
    driver.add(make_request("later", range(30, 50), max_tokens=1), seeds=(2,))
    assert [entry.seed for entry in slot_entries(driver)] == [0, 1, 1, 2]


def test_no_sequence_starts_in_the_step_that_preempts() -> None:
    driver = make_driver(num_blocks=5)
    add_pair(driver)
    driver.add(make_request("tiny", [30], max_tokens=1), seeds=(2,))
    plan = step_until_preemption(driver)
    assert plan is not None
    assert plan.slot_entries == ()


def test_tokens_computed_again_are_counted() -> None:
    driver = make_driver(num_blocks=5, enable_prefix_caching=False)
    add_pair(driver)
    *_, back = slot_entries(driver)
    stats = driver.scheduler.stats
    assert (stats.num_preemptions, stats.num_recomputed_tokens) == (1, len(back.token_ids))
    assert stats.num_generated_tokens == 26


def test_a_preempted_sequence_finds_its_own_blocks_again_if_they_are_still_there() -> None:
    driver = make_driver(num_blocks=7)
    add_pair(driver)
    *_, back = slot_entries(driver)
    assert driver.scheduler.stats.num_preemptions == 1
    assert back.num_computed > 0
    driver.check_answers()


def test_guaranteed_no_evict_never_preempts() -> None:
    driver = make_driver(num_blocks=5, capacity_policy="guaranteed_no_evict")
    add_pair(driver)
    assert [entry.seed for entry in slot_entries(driver)] == [0, 1]
    assert driver.scheduler.stats.num_preemptions == 0
    driver.check_answers()


def test_a_prompt_still_being_computed_can_be_preempted() -> None:
    driver = make_driver(num_blocks=8, max_num_batched_tokens=5)
    driver.add(make_request("old", range(4), max_tokens=13), seeds=(0,))
    driver.step()
    driver.add(make_request("young", range(10, 34), max_tokens=2), seeds=(1,))
    seeds = [entry.seed for entry in slot_entries(driver)]
    assert seeds == [1, 1]
    driver.check_answers()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("num_blocks", range(6, 12))
def test_siblings_survive_preemption(num_blocks: int, depth: int) -> None:
    driver = make_driver(num_blocks=num_blocks)
    driver.add(make_request("old", range(20, 26), max_tokens=12), seeds=(9,))
    driver.add(make_request("three", range(6), n=3, max_tokens=12))
    driver.drain(depth)
    assert driver.scheduler.stats.num_preemptions > 0
    driver.check_answers()
    driver.check_empty()


def test_siblings_that_restart_in_one_step_do_not_copy_blocks_that_it_computes() -> None:
    driver = make_driver(num_blocks=5)
    driver.add(make_request("old", range(20, 24), max_tokens=13), seeds=(9,))
    driver.add(make_request("two", range(6), n=2, max_tokens=9))
    for _ in range(6):  # long in flight, so that both siblings are preempted before a token of theirs is known
        driver.submit()
    assert driver.scheduler.stats.num_preemptions == 2
    returned = [len(entry.token_ids) for entry in slot_entries(driver, depth=6)]
    assert returned[:2] == [6, 6]
    driver.check_answers()
    driver.check_empty()
