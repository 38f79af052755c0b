"""What a step computes, which sequences start, and what they share."""

from __future__ import annotations

import msgspec
import pytest

from headrace.errors import RequestError
from headrace.sched import SchedulerLimits
from headrace.steps import StepPlan
from tests.sched.checking_runner import Driver, decode_alone, make_request


def make_driver(**options: object) -> Driver:
    """Blocks of four tokens, room for everything, unless told otherwise."""
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64, "num_blocks": 64, "block_size": 4}
    return Driver(SchedulerLimits(**{**values, **options}))  # type: ignore[arg-type]


def tokens_of(plan: StepPlan | None) -> dict[int, int]:
    """Slot -> number of tokens that the plan computes of it."""
    assert plan is not None
    return dict(zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True))


def finish(driver: Driver, depth: int = 0) -> None:
    driver.drain(depth)
    driver.check_answers()
    driver.check_empty()


# ---- steps


def test_nothing_to_do_is_no_plan() -> None:
    assert make_driver().scheduler.plan() is None


def test_a_prompt_is_computed_and_its_first_token_sampled_in_one_step() -> None:
    driver = make_driver()
    driver.add(make_request("one", range(10)))
    plan = driver.step()
    assert tokens_of(plan) == {0: 10}
    assert plan is not None
    assert plan.samples.tolist() == [True]


def test_decoding_does_not_wait_for_results() -> None:
    driver = make_driver()
    driver.add(make_request("one", range(10), max_tokens=5))
    assert [tokens_of(driver.submit()) for _ in range(5)] == [{0: 10}, {0: 1}, {0: 1}, {0: 1}, {0: 1}]
    assert driver.submit() is None
    finish(driver)


def test_a_decode_step_of_the_same_slots_as_before_is_steady() -> None:
    driver = make_driver()
    for name in ("one", "two"):
        driver.add(make_request(name, range(10), max_tokens=20))
    plans = [driver.step() for _ in range(4)]
    assert [plan.is_steady for plan in plans if plan] == [False, False, True, True]
    assert plans[3] is not None
    assert plans[3].slots is plans[2].slots  # type: ignore[union-attr]


def test_a_step_after_a_start_or_an_end_is_not_steady() -> None:
    driver = make_driver()
    driver.add(make_request("long", range(10), max_tokens=20))
    driver.add(make_request("short", range(10), max_tokens=5))
    [driver.step() for _ in range(3)]
    driver.add(make_request("new", range(3), max_tokens=20))
    steadiness = [driver.step().is_steady for _ in range(6)]  # type: ignore[union-attr]
    assert steadiness == [False, False, False, True, True, True]


def test_a_long_prompt_does_not_stall_running_sequences() -> None:
    driver = make_driver(max_num_batched_tokens=8)
    for name in ("one", "two"):
        driver.add(make_request(name, range(3), max_tokens=40))
    driver.step()
    driver.add(make_request("long", range(20, 60), max_tokens=2))
    shares = [tokens_of(driver.step()) for _ in range(7)]
    assert shares == [{0: 1, 1: 1, 2: 6}] * 6 + [{0: 1, 1: 1, 2: 4}]
    finish(driver)


def test_only_the_last_chunk_of_a_prompt_samples_a_token() -> None:
    driver = make_driver(max_num_batched_tokens=8)
    driver.add(make_request("long", range(20), max_tokens=2))
    samples = [driver.step().samples.tolist() for _ in range(3)]  # type: ignore[union-attr]
    assert samples == [[False], [False], [True]]


def test_several_prompts_share_the_budget_of_a_step() -> None:
    driver = make_driver(max_num_batched_tokens=16)
    for start in (0, 10, 20):
        driver.add(make_request(f"{start}", range(start, start + 7)))
    assert tokens_of(driver.step()) == {0: 7, 1: 7, 2: 2}
    assert tokens_of(driver.step()) == {0: 1, 1: 1, 2: 5}


def test_without_chunked_prefill_whole_prompts_are_computed_in_steps_of_their_own() -> None:
    driver = make_driver(enable_chunked_prefill=False)
    driver.add(make_request("one", range(10), max_tokens=4))
    driver.step()
    for start in (10, 20):
        driver.add(make_request(f"{start}", range(start, start + 30), max_tokens=3))
    assert tokens_of(driver.step()) == {1: 30, 2: 30}
    assert tokens_of(driver.step()) == {0: 1, 1: 1, 2: 1}
    finish(driver)


def test_without_chunked_prefill_a_prompt_that_does_not_fit_waits_for_the_next_step() -> None:
    driver = make_driver(enable_chunked_prefill=False)
    for start in (0, 40):
        driver.add(make_request(f"{start}", range(start, start + 40)))
    assert tokens_of(driver.step()) == {0: 40}
    assert tokens_of(driver.step()) == {1: 40}
    assert tokens_of(driver.step()) == {0: 1, 1: 1}


def test_no_more_sequences_run_than_there_are_slots() -> None:
    driver = make_driver(max_num_seqs=2)
    for number in range(5):
        driver.add(make_request(f"{number}", range(3), max_tokens=3))
    assert len(tokens_of(driver.step())) == 2
    assert (driver.scheduler.stats.num_running, driver.scheduler.stats.num_waiting) == (2, 3)
    finish(driver, depth=2)


def test_an_answer_never_outgrows_the_context() -> None:
    driver = make_driver(max_model_len=12)
    driver.add(make_request("one", range(10), max_tokens=None))
    finish(driver)
    assert len(driver.answers["one", 0].token_ids) == 2
    assert driver.answers["one", 0].finish_reason == "length"


def test_a_stop_token_ends_an_answer_and_is_its_last_token() -> None:
    driver = make_driver()
    driver.add(make_request("free", range(10), max_tokens=20))
    stop = driver.expected("free")[4]
    driver.add(make_request("stopped", range(10), max_tokens=20), stop_token_ids=(stop,))
    finish(driver, depth=3)
    answer = driver.answers["stopped", 0]
    assert (answer.finish_reason, answer.token_ids[-1]) == ("stop", stop)
    assert len(answer.token_ids) <= 5


def test_an_answer_does_not_depend_on_the_other_sequences() -> None:
    alone, batched = make_driver(), make_driver(max_num_batched_tokens=9, max_num_seqs=5)
    for number in range(9):
        batched.add(make_request(f"{number}", range(number, number + 7), max_tokens=9), seeds=(number,))
    for driver in (alone, batched):
        driver.add(make_request("mine", range(10), max_tokens=9), seeds=(1234,))
        finish(driver, depth=2)
    assert alone.answers["mine", 0].token_ids == batched.answers["mine", 0].token_ids


# ---- order and starting


def test_requests_start_in_the_order_of_their_arrival() -> None:
    driver = make_driver(max_num_seqs=1)
    for name, priority in (("first", 5), ("second", 0)):
        driver.add(make_request(name, range(4), max_tokens=1, priority=priority))
    assert [event.request_id for _ in range(2) for event in (driver.submit(), driver.collect())[1]] == [
        "first",
        "second",
    ]


def test_under_the_priority_policy_lower_numbers_start_first() -> None:
    driver = make_driver(max_num_seqs=1, queue_policy="priority")
    for name, priority in (("late", 5), ("urgent", -1), ("normal", 0)):
        driver.add(make_request(name, range(4), max_tokens=1, priority=priority))
    order = [event.request_id for _ in range(3) for event in (driver.submit(), driver.collect())[1]]
    assert order == ["urgent", "normal", "late"]


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="no tokens") as refusal:
        make_driver().add(make_request("empty", []))
    assert (refusal.value.param, refusal.value.code) == ("prompt", "empty_prompt")


def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers() -> None:
    driver = make_driver()
    with pytest.raises(RequestError, match=r"context length is 64 tokens.*64 tokens, and at least one") as refusal:
        driver.add(make_request("long", range(64)))
    assert refusal.value.code == "context_length_exceeded"
    driver.add(make_request("fits", range(63)))
    finish(driver)


def test_a_request_that_can_never_fit_the_cache_is_refused_with_the_numbers() -> None:
    driver = make_driver(num_blocks=5)
    with pytest.raises(RequestError, match=r"22 tokens need 6 cache blocks of 4 tokens, but there are 5") as refusal:
        driver.add(make_request("large", range(10), max_tokens=12))
    assert (refusal.value.param, refusal.value.code) == ("max_tokens", "cache_too_small")
    driver.add(make_request("just fits", range(10), max_tokens=11))
    finish(driver)


def test_a_refused_request_leaves_nothing_behind() -> None:
    driver = make_driver(num_blocks=5)
    with pytest.raises(RequestError):
        driver.add(make_request("one", range(10), max_tokens=40))
    assert not driver.scheduler.has_unfinished
    driver.add(make_request("one", range(10), max_tokens=4))
    finish(driver)


def test_a_request_id_is_refused_as_long_as_it_is_in_use() -> None:
    driver = make_driver()
    driver.add(make_request("same", range(4), max_tokens=2))
    with pytest.raises(RequestError, match="'same' is already running") as refusal:
        driver.scheduler.add(make_request("same", range(4)), seeds=(0,), stop_token_ids=())
    assert refusal.value.param == "request_id"
    finish(driver)
    driver.add(make_request("same", range(4), max_tokens=2))
    finish(driver)


def test_a_head_of_the_queue_that_does_not_fit_is_not_looked_up_again_until_there_is_room() -> None:
    driver = make_driver(num_blocks=6)
    driver.add(make_request("running", range(16), max_tokens=5))
    driver.step()
    driver.add(make_request("blocked", range(50, 66), max_tokens=2))
    lookups = []
    find_prefix = driver.scheduler.tables.find_prefix
    driver.scheduler.tables.find_prefix = lambda *args: lookups.append(args) or find_prefix(*args)  # type: ignore[method-assign, func-returns-value]
    for _ in range(3):
        driver.step()
    assert len(lookups) == 1
    finish(driver)
    assert len(lookups) == 2


def test_guaranteed_no_evict_starts_only_what_can_finish() -> None:
    driver = make_driver(num_blocks=7, capacity_policy="guaranteed_no_evict")
    for start in (0, 20):
        driver.add(make_request(f"{start}", range(start, start + 4), max_tokens=13))  # four blocks at the end
    assert tokens_of(driver.step()) == {0: 4}
    assert tokens_of(driver.step()) == {0: 1}
    finish(driver)
    assert driver.scheduler.stats.num_preemptions == 0


def test_a_static_batch_admits_no_sequence_until_all_of_it_have_finished() -> None:
    """TensorRT-LLM's rule: no new requests until all requests of the batch are completed, and none is evicted."""
    driver = make_driver(num_blocks=20, capacity_policy="static_batch")
    driver.add(make_request("short", range(4), max_tokens=2))
    driver.add(make_request("long", range(20, 24), max_tokens=6))
    assert tokens_of(driver.step()) == {0: 4, 1: 4}
    driver.add(make_request("late", range(40, 44), max_tokens=2))
    while driver.answers["long", 0].finish_reason is None:
        driver.step()
        assert not driver.answers["late", 0].token_ids
    assert driver.answers["short", 0].finish_reason == "length"
    finish(driver)
    assert len(driver.answers["late", 0].token_ids) == 2
    assert driver.scheduler.stats.num_preemptions == 0


def test_a_static_batch_starts_only_what_can_finish() -> None:
    driver = make_driver(num_blocks=7, capacity_policy="static_batch")
    for start in (0, 20):
        driver.add(make_request(f"{start}", range(start, start + 4), max_tokens=13))  # four blocks at the end
    assert tokens_of(driver.step()) == {0: 4}
    finish(driver)


def test_the_answers_of_one_request_are_one_static_batch() -> None:
    driver = make_driver(num_blocks=30, capacity_policy="static_batch")
    driver.add(make_request("two", range(4), n=2, max_tokens=4))
    driver.step()
    driver.add(make_request("late", range(20, 24), max_tokens=2))
    assert tokens_of(driver.step()) == {0: 1, 1: 1}  # the second answer has joined, the second request has not
    finish(driver)


# ---- prefixes


def test_a_prompt_with_a_cached_prefix_computes_only_the_rest() -> None:
    driver = make_driver()
    driver.add(make_request("first", range(10), max_tokens=2))
    driver.step()
    driver.add(make_request("second", [*range(8), 30, 31, 32], max_tokens=2))
    assert tokens_of(driver.step()) == {0: 1, 1: 3}
    finish(driver)
    assert driver.answers["second", 0].num_cached_tokens == 8


def test_prompts_share_a_prefix_even_within_one_step() -> None:
    driver = make_driver()
    for last in (30, 31):
        driver.add(make_request(f"{last}", [*range(8), last], max_tokens=2))
    assert tokens_of(driver.step()) == {0: 9, 1: 1}
    finish(driver)


def test_a_full_prefix_hit_recomputes_one_token_in_a_copied_block() -> None:
    driver = make_driver()
    driver.add(make_request("first", range(8), max_tokens=9))
    driver.step()
    driver.add(make_request("second", range(8), max_tokens=9), seeds=(5,))
    plan = driver.step()
    assert tokens_of(plan) == {0: 1, 1: 1}
    assert plan is not None
    ((source, target),) = plan.copies
    first, second = (sequence.table.blocks for sequence in driver.scheduler.slots.running() if sequence.table)
    assert first[0] == second[0]
    assert (source, target) == (first[1], second[1])
    finish(driver)
    assert driver.answers["second", 0].num_cached_tokens == 7


def test_a_full_hit_on_idle_blocks_needs_no_copy() -> None:
    driver = make_driver()
    driver.add(make_request("first", range(8), max_tokens=1))
    driver.drain()
    driver.add(make_request("second", range(8), max_tokens=9))
    plan = driver.step()
    assert plan is not None
    assert (tokens_of(plan), plan.copies) == ({0: 1}, ())
    finish(driver)


def test_a_block_is_not_copied_in_the_step_that_computes_it() -> None:
    driver = make_driver()
    for seed, name in enumerate(("first", "second")):
        driver.add(make_request(name, range(8), max_tokens=9), seeds=(seed,))
    plan = driver.step()
    assert plan is not None
    assert (tokens_of(plan), plan.copies) == ({0: 8, 1: 4}, ())
    finish(driver)


def test_an_answer_can_be_the_prefix_of_the_next_prompt() -> None:
    driver = make_driver()
    driver.add(make_request("turn one", range(8), max_tokens=9))
    driver.drain()
    answer = driver.answers["turn one", 0].token_ids
    driver.add(make_request("turn two", [*range(8), *answer, 30], max_tokens=2))
    finish(driver)
    assert driver.answers["turn two", 0].num_cached_tokens == 16


def test_a_block_whose_last_token_ended_an_answer_is_not_taken_for_computed() -> None:
    driver = make_driver()
    answer = decode_alone(range(8), seed=0, end_len=12)
    assert answer.index(answer[3]) == 3
    driver.add(make_request("stopped", range(8), max_tokens=20), stop_token_ids=(answer[3],))
    driver.drain(depth=3)  # steps in flight continued after the stop token, but the device did not
    driver.add(make_request("follow-up", [*range(8), *answer, 30], max_tokens=2))
    finish(driver)
    assert driver.answers["follow-up", 0].num_cached_tokens == 8


def test_prompts_under_different_salts_share_nothing() -> None:
    driver = make_driver()
    for salt in (None, "one", "other"):
        driver.add(make_request(f"{salt}", range(9), max_tokens=2, cache_salt=salt))
        driver.drain()
    assert [answer.num_cached_tokens for answer in driver.answers.values()] == [0, 0, 0]
    driver.add(make_request("again", range(9), max_tokens=2, cache_salt="one"))
    finish(driver)
    assert driver.answers["again", 0].num_cached_tokens == 8


def test_without_prefix_caching_nothing_is_reused() -> None:
    driver = make_driver(enable_prefix_caching=False)
    for name in ("first", "second"):
        driver.add(make_request(name, range(9), max_tokens=2))
        finish(driver)
    assert driver.answers["second", 0].num_cached_tokens == 0
    assert driver.scheduler.stats.num_blocks_idle == 0


def test_without_prefix_caching_requests_that_share_blocks_reuse_those_of_their_salt_only() -> None:
    driver = make_driver(enable_prefix_caching=False)
    shared = {"first": "a", "same": "a", "other": "b"}
    for name, salt in shared.items():
        request = make_request(name, range(9), max_tokens=2)
        driver.add(msgspec.structs.replace(request, cache_salt=salt, shares_blocks=True))
        finish(driver)
    driver.add(msgspec.structs.replace(make_request("alone", range(9), max_tokens=2), cache_salt="a"))
    finish(driver)
    cached = {name: driver.answers[name, 0].num_cached_tokens for name in (*shared, "alone")}
    assert cached == {"first": 0, "same": 8, "other": 0, "alone": 0}


def test_hits_are_counted_in_tokens_once_a_request() -> None:
    driver = make_driver()
    driver.add(make_request("first", range(10), max_tokens=2))
    driver.drain()
    driver.add(make_request("second", range(10), max_tokens=2, n=3))
    finish(driver)
    stats = driver.scheduler.stats
    assert (stats.num_prefix_queried_tokens, stats.num_prefix_hit_tokens, stats.prefix_hit_share) == (20, 8, 0.4)


# ---- siblings


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("prompt_len", [8, 9, 11])
def test_siblings_share_the_blocks_of_their_prompt(prompt_len: int, caching: bool) -> None:
    driver = make_driver(enable_prefix_caching=caching)
    driver.add(make_request("three", range(prompt_len), n=3, max_tokens=9))
    assert tokens_of(driver.step()) == {0: prompt_len}
    assert tokens_of(driver.step()) == {0: 1, 1: 1, 2: 1}
    num_shared = (prompt_len - 1) // 4  # the block of the last token is each one's own
    num_of_leader = -(-(prompt_len + 1) // 4)
    assert driver.scheduler.stats.num_blocks_held == num_of_leader + 2
    tables = [sequence.table.blocks for sequence in driver.scheduler.slots.running() if sequence.table]
    assert tables[0][:num_shared] == tables[1][:num_shared] == tables[2][:num_shared]
    finish(driver)


def test_siblings_wait_until_a_long_prompt_is_computed() -> None:
    driver = make_driver(max_num_batched_tokens=8)
    driver.add(make_request("three", range(20), n=3, max_tokens=3))
    assert [tokens_of(driver.step()) for _ in range(4)] == [{0: 8}, {0: 8}, {0: 4}, {0: 1, 1: 1, 2: 1}]
    finish(driver)


def test_each_sibling_samples_with_its_own_seed() -> None:
    driver = make_driver()
    driver.add(make_request("two", range(9), n=2, max_tokens=9), seeds=(1, 2))
    finish(driver)
    assert driver.answers["two", 0].token_ids != driver.answers["two", 1].token_ids


def test_more_siblings_than_slots_run_one_after_the_other() -> None:
    driver = make_driver(max_num_seqs=2)
    driver.add(make_request("five", range(9), n=5, max_tokens=3))
    finish(driver, depth=1)
    assert len(driver.answers) == 5


def test_siblings_start_on_their_own_when_the_parent_is_already_gone() -> None:
    driver = make_driver(max_num_seqs=1)
    driver.add(make_request("two", range(9), n=2, max_tokens=1), seeds=(1, 2))
    finish(driver)
    assert driver.answers["two", 1].num_cached_tokens == 8
