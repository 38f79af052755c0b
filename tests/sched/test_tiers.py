"""Blocks that come back from the tiers: whose they are, and when a sequence may compute with them."""

from __future__ import annotations

import numpy as np

from headrace.sched import SchedulerLimits
from headrace.sched.fetching import MAX_TRUST_S
from headrace.steps import StepPlan
from tests.kv.fake_store import FakeStore
from tests.sched.checking_runner import Driver, digest, make_request

SIZE = 4
PROMPT = [*range(2 * SIZE), 1]  # two full blocks, and a token to compute


def limits(**changes: int) -> SchedulerLimits:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 40, "num_blocks": 10, "block_size": SIZE}
    return SchedulerLimits(**{**sizes, "num_host_blocks": 32, **changes})


def run(driver: Driver, request_id: str, prompt: list[int], **options: object) -> int:
    """Run a request to its end; returns how many of its tokens were cached."""
    driver.add(make_request(request_id, prompt, max_tokens=2, **options))
    driver.drain()
    return driver.answers[request_id, 0].num_cached_tokens


def evict_all(driver: Driver) -> None:
    """Fill the cache with another prompt."""
    run(driver, "large", [30 + token % 7 for token in range(38)])


def test_an_evicted_prefix_is_a_hit_under_its_own_salt_only() -> None:
    driver = Driver(limits())
    run(driver, "first", PROMPT, cache_salt="mine")
    evict_all(driver)
    assert run(driver, "other", PROMPT, cache_salt="yours") == run(driver, "none", PROMPT) == 0
    assert run(driver, "mine", PROMPT, cache_salt="mine") == 2 * SIZE
    assert driver.scheduler.stats.num_tier_hit_tokens == 2 * SIZE
    driver.check_answers()


def starts(plan: StepPlan | None) -> list[int]:
    return [] if plan is None else [entry.slot for entry in plan.slot_entries]


def test_blocks_arrive_beside_a_step_and_their_sequence_computes_in_the_next_one() -> None:
    driver = Driver(limits(num_blocks=16))
    run(driver, "first", PROMPT)
    for number in range(2):
        run(driver, f"large {number}", [30 + token % (7 + number) for token in range(38)])
    driver.add(make_request("running", [25, 26], max_tokens=20))
    driver.step()
    driver.add(make_request("again", PROMPT, max_tokens=2))
    plan, after = driver.step(), driver.step()
    assert plan is not None and plan.transfers is not None and after is not None
    (slot,) = starts(plan)
    assert not plan.transfers.is_urgent and slot not in plan.slots and slot in after.slots
    driver.drain()
    driver.check_answers()
    assert driver.answers["again", 0].num_cached_tokens == 2 * SIZE


def test_a_step_waits_for_its_blocks_where_there_is_nothing_else_to_compute() -> None:
    driver = Driver(limits())
    run(driver, "first", PROMPT)
    evict_all(driver)
    driver.add(make_request("again", PROMPT, max_tokens=2))
    plan = driver.step()
    assert plan is not None and plan.transfers is not None and plan.transfers.is_urgent
    assert starts(plan) == plan.slots.tolist()


def with_disk() -> tuple[Driver, FakeStore, list[float]]:
    """A driver whose disk has the two blocks of the prompt, that disk, and the driver's clock."""
    store, now = FakeStore(), [0.0]
    driver = Driver(limits(), clock=lambda: now[0], store=store)
    chain = driver.scheduler.tables.tiers.chain  # type: ignore[union-attr]
    tokens = np.array(PROMPT, np.int32)
    for index, name in enumerate(chain.digests(chain.root(""), tokens.tobytes(), 4 * SIZE)):
        store.digests.add(name)
        ends = range(index * SIZE + 1, (index + 1) * SIZE + 1)
        content = tokens[ends[0] - 1 : ends[-1]], np.array([digest(tokens[:end]) for end in ends], np.uint32)
        store.contents[name] = content
    return driver, store, now


def arrive(driver: Driver, store: FakeStore) -> None:
    driver.runner.host.update({place: store.contents[name] for name, place in store.places.items()})
    store.end_all()


def test_a_sequence_starts_when_its_blocks_have_been_read() -> None:
    driver, store, _ = with_disk()
    driver.add(make_request("first", PROMPT, max_tokens=2))
    driver.add(make_request("second", PROMPT, max_tokens=2))
    assert driver.step() is None and driver.step() is None
    assert [what for what, *_ in store.asked] == ["read", "read"]
    arrive(driver, store)
    driver.drain()
    driver.check_answers()
    assert [driver.answers[name, 0].num_cached_tokens for name in ("first", "second")] == [2 * SIZE, 2 * SIZE]


def test_running_sequences_go_on_while_another_waits_for_the_disk() -> None:
    driver, store, _ = with_disk()
    driver.add(make_request("running", [25, 26], max_tokens=8))
    driver.step()
    driver.add(make_request("waiting", PROMPT, max_tokens=2))
    plan = driver.step()
    assert plan is not None and starts(plan) == []
    arrive(driver, store)
    driver.drain()
    driver.check_answers()


def test_a_sequence_computes_what_a_disk_does_not_give_it_in_time() -> None:
    driver, _, now = with_disk()
    driver.add(make_request("first", PROMPT, max_tokens=2))
    assert driver.step() is None
    now[0] = MAX_TRUST_S
    driver.drain()
    driver.check_answers()
    assert driver.answers["first", 0].num_cached_tokens == 0


def test_a_sequence_that_was_aborted_while_it_waited_leaves_nothing_behind() -> None:
    driver, store, _ = with_disk()
    driver.add(make_request("first", PROMPT, max_tokens=2))
    driver.step()
    driver.abort("first")
    arrive(driver, store)
    driver.drain()
    driver.check_empty()
    assert run(driver, "again", PROMPT) == 2 * SIZE


def test_idle_blocks_are_saved_at_the_end_most_recent_first() -> None:
    store = FakeStore()
    driver = Driver(limits(num_host_blocks=2), store=store)
    run(driver, "first", PROMPT)
    saved = []
    while (plan := driver.scheduler.plan_saving()) is not None:
        assert plan.num_batched_tokens == 0 and plan.transfers is not None
        saved += [what for what, *_ in store.asked]
        store.end_all()
    assert saved == ["write", "write"]
    driver.check_empty()
