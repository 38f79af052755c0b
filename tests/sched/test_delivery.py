"""Which events are delivered, when, and what they contain."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.sched import Scheduler, SchedulerLimits
from headrace.sched.sequence import sequence_seed
from headrace.steps import BROKEN, UNFINISHED, StepResult
from tests.sched.checking_runner import Driver, logprobs_of, make_request

LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, num_blocks=64, block_size=4)


def test_an_unwatched_answer_comes_in_one_event_at_its_end() -> None:
    driver = Driver(LIMITS)
    driver.add(make_request("one", range(9), max_tokens=7))
    driver.drain(depth=1)
    assert driver.answers["one", 0].num_events == 1
    driver.check_answers()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_watched_answer_comes_in_one_event_a_token(depth: int) -> None:
    driver = Driver(LIMITS)
    driver.add(make_request("one", range(9), max_tokens=7, watched=True))
    driver.drain(depth)
    assert driver.answers["one", 0].num_events == 7
    driver.check_answers()


def test_an_announced_answer_comes_in_two_events_its_first_token_and_the_rest() -> None:
    driver = Driver(LIMITS)
    driver.add(make_request("one", range(9), max_tokens=7, announced=True))
    driver.submit()
    (first,) = driver.collect()
    assert first.token_ids.tolist() == driver.expected("one")[:1] and first.timing is not None
    driver.drain(depth=1)
    assert driver.answers["one", 0].num_events == 2
    driver.check_answers()


def test_a_watched_chunked_prompt_has_no_event_before_its_first_token() -> None:
    driver = Driver(SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=4, max_model_len=64, num_blocks=64))
    driver.add(make_request("one", range(9), max_tokens=2, watched=True))
    events = []
    for _ in range(4):
        driver.submit()
        events.append(len(driver.collect()))
    assert events == [0, 0, 1, 1]


def test_the_last_event_says_why_it_is_the_last() -> None:
    driver = Driver(LIMITS)
    driver.add(make_request("full", range(9), max_tokens=3))
    driver.add(make_request("stopped", range(9), max_tokens=3), stop_token_ids=(driver.expected("full")[0],))
    driver.submit()
    (event,) = driver.collect()
    assert (event.request_id, event.finish_reason, event.stop_token_id) == (
        "stopped",
        "stop",
        driver.expected("full")[0],
    )
    driver.drain()
    assert driver.answers["full", 0].finish_reason == "length"


def test_a_stop_token_as_the_last_possible_token_counts_as_a_stop() -> None:
    driver = Driver(LIMITS)
    driver.add(make_request("free", range(9), max_tokens=3))
    driver.add(make_request("both", range(9), max_tokens=3), stop_token_ids=(driver.expected("free")[2],))
    driver.drain()
    assert driver.answers["both", 0].finish_reason == "stop"


@pytest.mark.parametrize("watched", [True, False])
def test_log_probabilities_come_with_their_tokens_as_many_as_were_asked_for(watched: bool) -> None:
    driver = Driver(LIMITS)
    for num_top in (0, 2):
        driver.add(make_request(f"{num_top}", range(9), max_tokens=5, logprobs=num_top, watched=watched))
    driver.drain(depth=2)
    for num_top in (0, 2):
        expected = [logprobs_of(token, num_top) for token in driver.expected(f"{num_top}")]
        assert driver.answers[f"{num_top}", 0].logprobs == expected


def test_a_request_without_log_probabilities_gets_none() -> None:
    driver = Driver(LIMITS)
    driver.add(make_request("asked", range(9), max_tokens=1, logprobs=1))
    driver.add(make_request("not asked", range(9), max_tokens=1))
    driver.submit()
    asked, not_asked = driver.collect()
    assert asked.logprobs is not None
    assert not_asked.logprobs is None


def test_broken_probabilities_end_only_the_sequence_they_belong_to() -> None:
    scheduler = Scheduler(LIMITS)
    for name in ("broken", "sound"):
        scheduler.add(make_request(name, range(9), max_tokens=5), seeds=(0,), stop_token_ids=())
    plan = scheduler.plan()
    assert plan is not None
    finished = np.array([BROKEN, UNFINISHED], np.uint8)
    (event,) = scheduler.apply(StepResult(plan.step, plan.slots, np.array([1, 2], np.int32), finished))
    assert (event.request_id, event.finish_reason) == ("broken", "abort")
    assert event.error is not None
    assert "NaN" in event.error
    assert scheduler.stats.num_running == 1


def test_the_first_sequence_has_the_requests_own_seed_and_the_others_have_scattered_ones() -> None:
    seeds = [sequence_seed(7, index) for index in range(100)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert set(seeds[1:]).isdisjoint(sequence_seed(8, index) for index in range(100))


def test_the_device_gets_seed_parameters_and_stops_once() -> None:
    driver = Driver(LIMITS)
    request = make_request("two", range(9), n=2, max_tokens=4, temperature=0.5)
    driver.add(request, seeds=(3, 4), stop_token_ids=(99,))
    slot_entries = [entry for _ in range(4) for entry in driver.step().slot_entries]  # type: ignore[union-attr]
    assert [entry.seed for entry in slot_entries] == [3, 4]
    assert all(entry.params is request.params for entry in slot_entries)
    assert all(entry.stop_token_ids == (99,) for entry in slot_entries)
    assert all((entry.prompt_len, entry.end_len) == (9, 13) for entry in slot_entries)
