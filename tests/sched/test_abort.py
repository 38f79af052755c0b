"""An abort at any moment frees everything and disturbs no other sequence."""

from __future__ import annotations

from headrace.sched import SchedulerLimits
from tests.sched.checking_runner import NEVER_SAMPLED, Driver, make_request


def make_driver(**options: object) -> Driver:
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "num_blocks": 64, "block_size": 4}
    return Driver(SchedulerLimits(**{**values, **options}), stop_token_ids=(NEVER_SAMPLED,))  # type: ignore[arg-type]


def finish(driver: Driver, depth: int = 0) -> None:
    driver.drain(depth)
    driver.check_answers()
    driver.check_empty()


def ends_of(driver: Driver, request_id: str, num: int) -> list[str | None]:
    return [driver.answers[request_id, index].finish_reason for index in range(num)]


def test_aborting_a_waiting_request_ends_it_without_tokens() -> None:
    driver = make_driver()
    driver.add(make_request("one", range(9)))
    (event,) = driver.abort("one")
    assert (event.finish_reason, event.token_ids.tolist()) == ("abort", [])
    assert driver.scheduler.plan() is None
    finish(driver)


def test_aborting_a_running_request_brings_the_tokens_so_far_and_frees_its_blocks() -> None:
    driver = make_driver()
    driver.add(make_request("one", range(9), max_tokens=20))
    for _ in range(4):
        driver.step()
    (event,) = driver.abort("one")
    assert event.token_ids.tolist() == driver.expected("one")[:4]
    driver.check_empty()


def test_aborting_a_prompt_half_computed_frees_its_blocks() -> None:
    driver = make_driver(max_num_batched_tokens=8)
    driver.add(make_request("one", range(30)))
    driver.step()
    driver.abort("one")
    driver.check_empty()


def test_results_that_arrive_after_an_abort_are_dropped() -> None:
    driver = make_driver()
    driver.add(make_request("one", range(9), max_tokens=20))
    for _ in range(3):
        driver.submit()
    driver.abort("one")
    driver.check_empty()
    assert [driver.collect() for _ in range(3)] == [[], [], []]


def test_the_next_owner_of_a_slot_does_not_get_its_predecessors_results() -> None:
    driver = make_driver(max_num_seqs=1)
    driver.add(make_request("one", range(9), max_tokens=20))
    for _ in range(3):
        driver.submit()
    driver.abort("one")
    driver.add(make_request("two", range(20, 29), max_tokens=5), seeds=(7,))
    driver.submit()
    finish(driver, depth=3)
    assert len(driver.answers["two", 0].token_ids) == 5


def test_the_next_owner_of_blocks_is_not_disturbed_by_steps_in_flight() -> None:
    driver = make_driver(num_blocks=5, max_model_len=21)
    driver.add(make_request("one", range(9), max_tokens=10))
    for _ in range(3):
        driver.submit()
    driver.abort("one")
    driver.add(make_request("two", range(20, 36), max_tokens=5), seeds=(7,))
    finish(driver, depth=3)
    assert len(driver.answers["two", 0].token_ids) == 5


def test_a_preempted_request_can_be_aborted_while_it_waits() -> None:
    driver = make_driver(num_blocks=5)
    for seed, name in enumerate(("old", "young")):
        driver.add(make_request(name, range(10 * seed, 10 * seed + 4), max_tokens=13), seeds=(seed,))
    for _ in range(8):
        driver.step()
    assert driver.scheduler.stats.num_preemptions == 1
    (event,) = driver.abort("young")
    assert 0 < len(event.token_ids) < 13
    finish(driver)


def test_one_sibling_can_be_aborted_alone() -> None:
    driver = make_driver()
    driver.add(make_request("three", range(9), n=3, max_tokens=6))
    for _ in range(3):
        driver.step()
    (event,) = driver.abort("three", 1)
    assert event.index == 1
    finish(driver)
    assert ends_of(driver, "three", 3) == ["length", "abort", "length"]


def test_siblings_continue_when_the_parent_that_computes_their_prompt_is_aborted() -> None:
    driver = make_driver(max_num_batched_tokens=8)
    driver.add(make_request("three", range(20), n=3, max_tokens=6))
    driver.step()
    driver.abort("three", 0)
    finish(driver)
    assert ends_of(driver, "three", 3) == ["abort", "length", "length"]


def test_siblings_continue_when_the_parent_is_aborted_before_it_starts() -> None:
    driver = make_driver()
    driver.add(make_request("three", range(9), n=3, max_tokens=6))
    driver.abort("three", 0)
    finish(driver)
    assert ends_of(driver, "three", 3) == ["abort", "length", "length"]


def test_siblings_continue_when_the_parent_is_aborted_with_its_prompt_in_flight() -> None:
    driver = make_driver()
    driver.add(make_request("three", range(10), n=3, max_tokens=6))
    driver.submit()
    driver.abort("three", 0)
    finish(driver, depth=2)
    assert ends_of(driver, "three", 3) == ["abort", "length", "length"]


def test_a_sibling_that_waits_for_the_prompt_can_be_aborted() -> None:
    driver = make_driver()
    driver.add(make_request("three", range(9), n=3, max_tokens=6))
    driver.abort("three", 2)
    finish(driver)
    assert ends_of(driver, "three", 3) == ["length", "length", "abort"]


def test_aborting_a_request_ends_all_its_sequences() -> None:
    driver = make_driver(max_num_seqs=2)
    driver.add(make_request("three", range(9), n=3, max_tokens=6))
    for _ in range(2):
        driver.step()
    assert [event.index for event in driver.abort("three")] == [0, 1, 2]
    assert not driver.scheduler.has_unfinished
    driver.check_empty()


def test_aborting_what_is_unknown_or_over_is_no_error() -> None:
    driver = make_driver()
    driver.add(make_request("one", range(9), max_tokens=1))
    driver.drain()
    assert driver.abort("one") == driver.abort("never heard of") == []
    assert driver.scheduler.stats.num_aborted == 0


def test_an_aborted_prompt_leaves_its_computed_blocks_to_others() -> None:
    driver = make_driver()
    driver.add(make_request("one", range(9), max_tokens=20))
    driver.step()
    driver.abort("one")
    driver.add(make_request("two", range(9), max_tokens=3))
    finish(driver)
    assert driver.answers["two", 0].num_cached_tokens == 8
