"""Which blocks are read from a disk, and who waits for them: never longer than computing them would take."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kv.read_rate import MAX_AGE_S, ReadRate
from headrace.sched import SchedulerLimits, fetching
from headrace.sched.compute_rate import ComputeRate
from headrace.sched.plan_builder import PlanBuilder
from tests.kv.fake_store import Content, TimedStore
from tests.sched.checking_runner import Driver, make_request

SIZE = 4
TOKEN_S = 0.001  # of the device
STEP_S = 0.002  # of a step of any size
PREFIX_BLOCKS = 8
TRUST_S = 0.02
MAX_LOSS = 1.03  # reads take places of the host tier, and prompts that wait make steps smaller
NUM_PREFIXES = 10
BLOCK_S = SIZE * TOKEN_S
PREFIX_S = PREFIX_BLOCKS * BLOCK_S


class Simulation:
    """A device and a disk by a clock that only they move. The cache holds two prefixes, and the host tier three."""

    def __init__(
        self,
        *,
        read_s: float | None,
        later_s: float | None = None,
        on_disk: dict[bytes, Content] | None = None,
        depth: int = 1,
        budget: int = 80,
    ) -> None:
        """`read_s`: of a block, and `later_s` after half of the rounds; None: there is no disk."""
        self.now = 0.0
        self._later_s = later_s
        self.store = None if read_s is None else TimedStore(lambda: self.now, read_s=read_s)
        limits = SchedulerLimits(
            max_num_seqs=3,
            max_num_batched_tokens=budget,
            max_model_len=SIZE * PREFIX_BLOCKS + 8,
            num_blocks=30,
            block_size=SIZE,
            num_host_blocks=3 * PREFIX_BLOCKS,
        )
        self.driver = Driver(limits, clock=lambda: self.now, store=self.store)
        if self.store is not None:
            self.store.memory, self.store.end_copies = self.driver.runner.host, self.driver.runner.end_copies
            self.store.contents |= on_disk or {}
        self._depth = depth
        self._ends: list[float] = []  # of the steps in flight
        self._num_requests = 0

    def add(self, prefix: int) -> None:
        self._num_requests += 1
        dice = random.Random(prefix)
        prompt = [dice.randrange(40) for _ in range(SIZE * PREFIX_BLOCKS)]
        tail = [self._num_requests % 40, 1]
        self.driver.add(make_request(f"{self._num_requests}", [*prompt, *tail], max_tokens=2))

    def run(self) -> None:
        """Until all is answered."""
        driver = self.driver
        while driver.scheduler.has_unfinished or driver.in_flight:
            plan = driver.submit()
            if plan is not None:
                begins = max(self.now, self._ends[-1] if self._ends else 0.0)
                self._ends.append(begins + STEP_S + plan.num_batched_tokens * TOKEN_S)
            if self._ends and (plan is None or len(self._ends) > self._depth):
                self.now = max(self.now, self._ends.pop(0))
                driver.collect()
            elif plan is None:
                assert self.store is not None and self.store.next_end is not None, "nothing to wait for"
                self.now = max(self.now, min(self.store.next_end, self.now + 0.001))

    def num_cached(self, request: int) -> int:
        return self.driver.answers[f"{request}", 0].num_cached_tokens

    def rounds(self, num_rounds: int, *, at_once: int) -> float:
        """Send all prefixes in a shuffled order, so many at once; returns the seconds."""
        began = self.now
        for number in range(num_rounds):
            if self.store is not None and self._later_s is not None and number == num_rounds // 2:
                self.store.read_s = self._later_s
            order = list(range(NUM_PREFIXES))
            random.Random(f"round {number}").shuffle(order)
            for first in range(0, NUM_PREFIXES, at_once):
                for prefix in order[first : first + at_once]:
                    self.add(prefix)
                self.run()
        self.driver.check_answers()
        self.driver.check_empty()
        return self.now - began


def full_disk() -> dict[bytes, Content]:
    """The blocks of all prefixes."""
    simulation = Simulation(read_s=1.0)
    assert simulation.store is not None
    for _ in range(2):
        for prefix in range(NUM_PREFIXES):
            simulation.add(prefix)
            simulation.run()
    return simulation.store.contents


@pytest.fixture(autouse=True)
def small_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "MAX_TRUST_S", TRUST_S)


@pytest.fixture(scope="module")
def on_disk() -> dict[bytes, Content]:
    return full_disk()


SHARES = [0.05, 0.2, 0.5, 0.9, 1.1, 2.0, 10.0]  # the rate of the disk by that of the device


@pytest.mark.parametrize("at_once", [1, 2, 4, 10])
@pytest.mark.parametrize("share", SHARES)
def test_a_workload_is_not_slower_than_without_a_disk(
    share: float, at_once: int, on_disk: dict[bytes, Content]
) -> None:
    without = Simulation(read_s=None).rounds(10, at_once=at_once)
    for found in ({}, on_disk):
        simulation = Simulation(read_s=BLOCK_S / share, on_disk=found)
        assert simulation.rounds(10, at_once=at_once) <= MAX_LOSS * without + TRUST_S


@settings(deadline=None)
@given(
    share=st.sampled_from(SHARES),
    later=st.sampled_from([*SHARES, 1e-9]),
    at_once=st.integers(1, 10),
    depth=st.integers(0, 2),
    budget=st.sampled_from([16, 40, 80, 200]),
    is_full=st.booleans(),
)
def test_nor_with_a_disk_whose_rate_changes(
    *, share: float, later: float, at_once: int, depth: int, budget: int, is_full: bool, on_disk: dict[bytes, Content]
) -> None:
    without = Simulation(read_s=None, depth=depth, budget=budget).rounds(4, at_once=at_once)
    simulation = Simulation(
        read_s=BLOCK_S / share, on_disk=on_disk if is_full else {}, depth=depth, budget=budget, later_s=BLOCK_S / later
    )
    # One prompt may wait for reads that have become slow; others do not.
    assert simulation.rounds(4, at_once=at_once) <= 1.1 * without + TRUST_S + 4 * PREFIX_S


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_a_fast_disk_saves_most_of_the_time(at_once: int, on_disk: dict[bytes, Content]) -> None:
    without = Simulation(read_s=None).rounds(5, at_once=at_once)
    assert Simulation(read_s=BLOCK_S / 10, on_disk=on_disk).rounds(5, at_once=at_once) < 0.4 * without


def test_a_slow_disk_reads_for_some_prompts_while_others_are_computed(on_disk: dict[bytes, Content]) -> None:
    without = Simulation(read_s=None).rounds(5, at_once=10)
    assert Simulation(read_s=2 * BLOCK_S, on_disk=on_disk).rounds(5, at_once=10) < 0.95 * without


def test_the_first_prompt_after_a_start_waits_for_the_disk(on_disk: dict[bytes, Content]) -> None:
    simulation = Simulation(read_s=BLOCK_S / 20, on_disk=on_disk)
    simulation.add(0)
    simulation.run()
    assert simulation.num_cached(1) == PREFIX_BLOCKS * SIZE


def test_prompts_wait_for_a_disk_in_all_so_long_until_one_of_them_is_computed(on_disk: dict[bytes, Content]) -> None:
    simulation = Simulation(read_s=2 * BLOCK_S, on_disk=on_disk)
    for prefix in range(6):
        simulation.add(prefix)
        simulation.run()
    cached = [simulation.num_cached(number) for number in range(1, 7)]
    assert cached[0] < PREFIX_BLOCKS * SIZE and sum(cached[1:]) == 0
    assert simulation.now < TRUST_S + 6 * (PREFIX_S + 10 * STEP_S)


def test_a_disk_that_has_become_faster_is_used_again(on_disk: dict[bytes, Content]) -> None:
    simulation = Simulation(read_s=5 * BLOCK_S, on_disk=on_disk)
    assert simulation.store is not None
    simulation.rounds(2, at_once=1)
    simulation.store.read_s = BLOCK_S / 10
    num_reads = simulation.store.num_reads
    simulation.rounds(2, at_once=1)
    assert simulation.store.num_reads == num_reads  # it is still thought slow
    simulation.now += MAX_AGE_S
    simulation.rounds(2, at_once=1)
    assert simulation.store.num_reads > num_reads + 10 * PREFIX_BLOCKS


# ---- the rates


def test_the_time_of_reads_that_run_at_once_is_not_counted_twice() -> None:
    reads = ReadRate()
    for _ in range(4):
        reads.asked(1.0)
    assert reads.block_s(1.0) is None
    for at in (1.3, 1.3, 1.4, 1.4):
        reads.ended(at)
    reads.asked(9.0)
    reads.ended(9.1)
    assert reads.block_s(9.1) == pytest.approx(0.1, rel=0.05)
    assert reads.num_pending == 0 and not reads.is_old(9.1) and reads.is_old(9.2 + MAX_AGE_S)


def test_a_read_that_hangs_makes_the_disk_slow_before_it_ends() -> None:
    reads = ReadRate()
    for _ in range(2):
        reads.asked(0.0)
    reads.ended(0.1)
    assert reads.block_s(0.1) == pytest.approx(0.1)
    assert reads.block_s(10.1) == pytest.approx(10.1 / 2)


def computed(rate: ComputeRate, number: int, num_tokens: int, *, begun: float, ended: float) -> None:
    plan = PlanBuilder(number, 1000)
    plan.compute(0, num_tokens, samples=True)
    rate.planned(plan.finish(None, None), begun)
    rate.applied(number, ended)


def test_only_large_steps_tell_how_fast_prompts_are_computed() -> None:
    rate = ComputeRate(1000)
    computed(rate, 0, 10, begun=0.0, ended=1.0)
    assert rate.token_s(20) == pytest.approx(0.1) and rate.token_s(21) is None
    computed(rate, 1, 500, begun=1.0, ended=6.0)
    assert rate.token_s(20) == rate.token_s(10_000) == pytest.approx(0.01)
    computed(rate, 2, 10, begun=6.0, ended=9.0)
    assert rate.token_s(500) == pytest.approx(0.01)


def test_a_step_that_was_planned_ahead_begins_when_the_one_before_it_ends() -> None:
    rate = ComputeRate(1000)
    plans = [PlanBuilder(number, 1000) for number in range(2)]
    for plan in plans:
        plan.compute(0, 100, samples=True)
        rate.planned(plan.finish(None, None), 0.0)
    rate.applied(0, 1.0)
    assert rate.in_flight_s(1.25) == pytest.approx(0.75)
    rate.applied(1, 2.0)
    assert rate.token_s(100) == pytest.approx(0.01)
    assert rate.in_flight_s(2.0) == 0.0
