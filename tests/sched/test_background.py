"""Background work beside interactive requests, in simulated time: a step takes a fixed time and a time per token."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from headrace.runner.fake import FakeRunner
from headrace.sched import Scheduler, SchedulerLimits
from headrace.sched.background import MAX_SLOWDOWN, RECENT_S
from headrace.steps import StepPlan, StepResult
from headrace.types import BACKGROUND_PRIORITY, Request
from tests.sched.checking_runner import make_request

STEP_S, TOKEN_S = 0.010, 0.002
LINE_LEN, LINE_ANSWER = 80, 64
NUM_SEQS = 64


@dataclass
class Simulation:
    """The engine's loop with `depth` steps queued, and a device in simulated time."""

    depth: int = 1
    step_s: float = STEP_S
    token_s: float = TOKEN_S
    has_batch: bool = True
    now: float = 0.0
    plans: list[StepPlan] = field(default_factory=list)
    arrived_at: dict[str, float] = field(default_factory=dict)
    token_at: dict[str, list[float]] = field(default_factory=dict)
    num_lines_done: int = 0
    _device_free_at: float = 0.0
    _in_flight: deque[tuple[float, StepResult]] = field(default_factory=deque)
    _num_lines: int = 0

    def __post_init__(self) -> None:
        limits = SchedulerLimits(
            max_num_seqs=NUM_SEQS,
            max_num_batched_tokens=512,
            max_model_len=512,
            num_blocks=4000,
            queue_policy="priority",
        )
        self.scheduler = Scheduler(limits, clock=lambda: self.now)
        self._runner = FakeRunner(max_num_seqs=NUM_SEQS)
        self._dice = random.Random(1)

    def run(self, until: float, arrivals: list[float] | None = None, *, prompt_len: int = 96, answer: int = 32) -> None:
        """Let interactive requests arrive at these times."""
        due = deque(arrivals or [])
        while self.now < until:
            while due and due[0] <= self.now:
                self._arrive(due.popleft(), prompt_len, answer)
            while self.has_batch and self._num_lines - self.num_lines_done < NUM_SEQS:
                self._add_line()
            if not self._step():
                self.now = due[0] if due else until

    def percentile(self, share: float) -> float:
        waits = sorted(self.token_at[name][0] - at for name, at in self.arrived_at.items() if self.token_at[name])
        return waits[int(share * (len(waits) - 1))]

    def _arrive(self, at: float, prompt_len: int, answer: int) -> None:
        name = f"interactive-{len(self.arrived_at)}"
        self.arrived_at[name], self.token_at[name] = at, []
        self._add(make_request(name, self._tokens(prompt_len), max_tokens=answer, watched=True))

    def _add_line(self) -> None:
        name = f"line-{self._num_lines}"
        self._num_lines += 1
        tokens = self._tokens(LINE_LEN)
        self._add(make_request(name, tokens, max_tokens=LINE_ANSWER, priority=BACKGROUND_PRIORITY))

    def _add(self, request: Request) -> None:
        self.scheduler.add(request, seeds=(0,), stop_token_ids=())

    def _tokens(self, count: int) -> list[int]:
        return [self._dice.randrange(1000) for _ in range(count)]

    def _step(self) -> bool:
        """Returns whether there was something to do."""
        plan = self.scheduler.plan()
        if plan is not None:
            self.plans.append(plan)
            seconds = self.step_s + self.token_s * plan.num_batched_tokens
            self._device_free_at = max(self.now, self._device_free_at) + seconds
            self._in_flight.append((self._device_free_at, self._runner.submit(plan)))
        is_working = bool(self._in_flight)
        if is_working and (plan is None or len(self._in_flight) > self.depth):
            self._collect()
        return is_working

    def _collect(self) -> None:
        ended_at, result = self._in_flight.popleft()
        self.now = max(self.now, ended_at)
        for event in self.scheduler.apply(result):
            if event.request_id in self.token_at:
                self.token_at[event.request_id] += [self.now] * len(event.token_ids)
            else:
                self.num_lines_done += event.finish_reason is not None


def poisson(rate: float, seconds: float) -> list[float]:
    dice, at, found = random.Random(2), 0.0, []
    while (at := at + dice.expovariate(rate)) < seconds:
        found.append(at)
    return found


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("rate", [0.3, 1.0, 2.0])
def test_a_saturating_batch_at_most_doubles_p95_of_the_time_to_first_token(rate: float, depth: int) -> None:
    arrivals = poisson(rate, 80.0)
    alone, beside = Simulation(depth, has_batch=False), Simulation(depth)
    for simulation in (alone, beside):
        simulation.run(100.0, arrivals)
    assert len(beside.arrived_at) == len(arrivals)
    assert beside.percentile(0.95) <= 2.0 * alone.percentile(0.95)
    assert beside.num_lines_done > 0


def test_interactive_decodes_are_slowed_down_by_a_limited_factor() -> None:
    simulation = Simulation()
    simulation.run(30.0, [1.0, 20.0], answer=200)
    times = simulation.token_at["interactive-1"][8:]  # the first ones measure and find the limit
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) <= 1.1 * MAX_SLOWDOWN * (STEP_S + TOKEN_S)


def test_a_batch_alone_is_not_limited() -> None:
    simulation = Simulation()
    simulation.run(20.0, [1.0])
    assert max(plan.num_batched_tokens for plan in simulation.plans[-50:]) <= NUM_SEQS  # decode steps are short
    num_before = len(simulation.plans)
    simulation.run(20.0 + RECENT_S + 20.0)
    assert max(len(plan.slots) for plan in simulation.plans[num_before:]) == NUM_SEQS
    alone = Simulation()
    alone.run(10.0)
    assert max(plan.num_batched_tokens for plan in alone.plans) == 512


def test_the_limit_does_not_fall_where_fewer_tokens_save_no_time() -> None:
    """As on a GPU: reading the weights takes most of a step."""
    alone, beside = (Simulation(2, step_s=0.010, token_s=0.00001) for _ in range(2))
    alone.run(10.0)
    beside.run(10.0, poisson(1.0, 10.0), prompt_len=32, answer=8)
    assert beside.num_lines_done >= 0.8 * alone.num_lines_done


def test_every_line_ends_under_steady_interactive_traffic() -> None:
    simulation = Simulation()
    simulation.run(100.0, poisson(2.0, 1000.0)[:190])
    simulation.has_batch = False
    simulation.run(400.0, poisson(1.0, 1000.0))
    assert simulation.num_lines_done == simulation._num_lines
