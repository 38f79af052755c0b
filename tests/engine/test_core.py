from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from headrace.engine.core import EngineCore
from headrace.errors import RequestError
from headrace.runner.fake import FakeRunner
from headrace.sched import Scheduler, SchedulerLimits
from headrace.steps import StepPlan, StepResult
from headrace.types import Request, SamplingParams, SequenceEvent

LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, num_blocks=24, block_size=4)


class RecordingRunner(FakeRunner):
    """Records how many steps are in flight whenever the host waits for one."""

    def __init__(self, vocab_size: int = 50) -> None:
        super().__init__(max_num_seqs=LIMITS.max_num_seqs, vocab_size=vocab_size)
        self.plans: list[StepPlan] = []
        self.in_flight: deque[int] = deque()
        self.num_in_flight_at_collect: list[int] = []
        self.is_closed = False

    def submit(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.in_flight.append(plan.step)
        return super().submit(plan)

    def collect(self, ticket: StepResult) -> StepResult:
        self.num_in_flight_at_collect.append(len(self.in_flight))
        assert self.in_flight.popleft() == ticket.step
        return super().collect(ticket)

    def close(self) -> None:
        assert not self.in_flight
        self.is_closed = True


def make_core(runner: RecordingRunner | None = None, **options: object) -> EngineCore:
    return EngineCore(Scheduler(LIMITS), runner or RecordingRunner(), **options)  # type: ignore[arg-type]


def make_request(request_id: str, prompt_len: int = 9, **params: object) -> Request:
    return Request(request_id, np.arange(prompt_len, dtype=np.int32), SamplingParams(**params))  # type: ignore[arg-type]


def run(core: EngineCore) -> dict[tuple[str, int], list[int]]:
    events: list[SequenceEvent] = []
    while core.has_work:
        events += core.step()
    return {(event.request_id, event.index): event.token_ids.tolist() for event in events}


def many_requests() -> list[Request]:
    return [
        make_request(f"{n}", prompt_len=1 + 3 * n, n=1 + n % 3, seed=n, max_tokens=12, stop_token_ids=[n])
        for n in range(12)
    ]


@pytest.mark.parametrize("depth", [1, 3])
def test_running_ahead_does_not_change_an_answer(depth: int) -> None:
    at_once, ahead = make_core(depth=0), make_core(depth=depth)
    for core in (at_once, ahead):
        for request in many_requests():
            core.add(request)
    assert run(ahead) == run(at_once)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_host_does_not_wait_for_a_step_while_the_device_has_fewer_than_it_may(depth: int) -> None:
    runner = RecordingRunner()
    core = make_core(runner, depth=depth)
    core.add(make_request("one", max_tokens=10, ignore_eos=True))
    num_steps_without_waiting = 0
    while not runner.num_in_flight_at_collect:
        core.step()
        num_steps_without_waiting += 1
    assert num_steps_without_waiting == depth + 1
    run(core)
    while_busy = runner.num_in_flight_at_collect[: 10 - depth]
    assert while_busy == [depth + 1] * (10 - depth)


def test_when_nothing_is_left_to_plan_the_steps_in_flight_are_applied() -> None:
    runner = RecordingRunner()
    core = make_core(runner, depth=3)
    core.add(make_request("one", max_tokens=2))
    assert len(run(core)["one", 0]) == 2
    assert runner.num_in_flight_at_collect == [2, 1]


def test_an_idle_step_does_nothing() -> None:
    core = make_core()
    assert not core.has_work
    assert core.step() == []


def test_work_remains_until_the_steps_of_an_aborted_request_are_applied() -> None:
    core = make_core(depth=3)
    core.add(make_request("one", max_tokens=20))
    core.step()
    (event,) = core.abort("one")
    assert event.finish_reason == "abort"
    assert core.has_work
    assert run(core) == {}
    assert not core.has_work


def test_closing_collects_the_steps_in_flight_and_closes_the_runner() -> None:
    runner = RecordingRunner()
    core = make_core(runner, depth=3)
    core.add(make_request("one", max_tokens=20))
    for _ in range(3):
        core.step()
    assert len(runner.in_flight) == 3
    core.close()
    assert runner.is_closed


def test_a_request_without_a_seed_gets_one_from_the_engines_own() -> None:
    answers = []
    for seed in (1, 1, 2):
        core = make_core(seed=seed)
        core.add(make_request("one", max_tokens=10))
        answers.append(run(core))
    assert answers[0] == answers[1] != answers[2]


def test_a_request_with_a_seed_does_not_depend_on_the_engines() -> None:
    answers = []
    for seed in (1, 2):
        core = make_core(seed=seed)
        core.add(make_request("one", n=2, seed=7, max_tokens=10))
        answers.append(run(core))
    assert answers[0] == answers[1]
    assert answers[0]["one", 0] != answers[0]["one", 1]


def test_end_of_sequence_tokens_stop_an_answer_unless_ignored() -> None:
    core = make_core(RecordingRunner(vocab_size=2), eos_token_ids=(1,))
    core.add(make_request("stops", seed=3, max_tokens=30))
    core.add(make_request("goes on", seed=3, max_tokens=30, ignore_eos=True))
    answers = run(core)
    assert len(answers["goes on", 0]) == 30
    assert answers["stops", 0] == answers["goes on", 0][: answers["goes on", 0].index(1) + 1]


def test_stop_ids_of_engine_and_request_are_combined_without_repetition() -> None:
    runner = RecordingRunner()
    core = make_core(runner, eos_token_ids=(48, 49))
    core.add(make_request("both", max_tokens=1, stop_token_ids=[49, 7]))
    core.add(make_request("own", max_tokens=1, stop_token_ids=[49, 7], ignore_eos=True))
    core.step()
    assert [entry.stop_token_ids for entry in runner.plans[0].slot_entries] == [(48, 49, 7), (49, 7)]


def test_a_refused_request_is_an_error_at_once() -> None:
    core = make_core()
    with pytest.raises(RequestError, match="64"):
        core.add(make_request("long", prompt_len=64))
    assert not core.has_work


def test_host_time_and_waiting_time_are_counted_apart() -> None:
    core = make_core()
    core.add(make_request("one", max_tokens=10))
    run(core)
    stats = core.stats
    assert stats.host_seconds > 0.0
    assert stats.wait_seconds > 0.0
    assert stats.scheduler.num_generated_tokens == 10


def test_each_applied_step_is_in_the_histograms_of_time() -> None:
    core = make_core(depth=1)
    core.add(make_request("one", max_tokens=10))
    run(core)
    stats = core.stats
    assert stats.step_seconds.num_values == stats.step_host_seconds.num_values == stats.scheduler.num_steps
    assert 0.0 < stats.step_host_seconds.total < stats.step_seconds.total
    assert stats.step_host_seconds.total <= stats.host_seconds
    assert stats.started_at > 0.0
