"""What the policy decides when one of several workers dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.jobs.recovery.policy import Progress, RecoveryPolicy, WorkerDeath
from headrace.jobs.store.failure_log import FailureLog
from tests.jobs.conftest import settings_of
from tests.jobs.faults import AT_ONCE, OutOfMemoryError


def died(policy: RecoveryPolicy, worker: int, lines: list[int], *, num_ended: int = 0, others: tuple[int, ...]) -> Any:
    return policy.engine_died(
        RuntimeError("gone"),
        lines,
        Progress(num_ended, num_ended),
        settings_of(EngineConfig()),
        had_own_process=True,
        death=WorkerDeath(worker, others, num_ended),
    )


def two_workers(log: FailureLog | None = None) -> RecoveryPolicy:
    shares = [(EngineConfig(), 1), (EngineConfig(), 1)]
    return RecoveryPolicy(log or FailureLog(None), EngineConfig(), rules=AT_ONCE, shares=shares)


def test_a_line_in_flight_at_deaths_of_two_workers_is_searched_on_the_second() -> None:
    policy = two_workers()
    assert died(policy, 0, [1, 2, 3], others=(1,)) is not None
    assert not policy.is_searching, "one death says nothing"
    assert died(policy, 1, [3, 7, 8], others=(0,)) is not None
    assert (policy.suspects_of(0).trial, policy.suspects_of(1).trial) == (None, {3})
    assert policy.reserved() == {3: 1}


def test_a_line_is_blamed_only_if_its_worker_answers_others_or_a_second_one_dies_too() -> None:
    policy = two_workers()
    for _ in range(4):
        died(policy, 0, [3], others=(1,))
    assert not policy.has_poison, "the worker may be the cause"
    assert (policy.suspects_of(0).trial, policy.suspects_of(1).trial) == (None, {3})
    died(policy, 1, [3], others=(0,))
    assert policy.has_poison
    answering = two_workers()
    for num_ended in (0, 0, 5, 5):
        died(answering, 0, [3], num_ended=num_ended, others=(1,))
    assert answering.has_poison, "the worker has answered five others meanwhile"


def test_a_worker_that_dies_four_times_without_an_answer_is_given_up_only_if_there_are_others() -> None:
    policy = two_workers()
    for number in range(3):
        assert died(policy, 0, [10 * number], others=(1,)) is not None
    assert died(policy, 0, [90], others=(1,)) is None
    assert died(two_workers(), 0, [90], others=()) is not None


def test_searches_of_more_workers_than_a_later_run_has_go_on(tmp_path: Path) -> None:
    policy = two_workers(FailureLog(tmp_path / "trouble.jsonl"))
    for worker, line in ((0, 4), (0, 4), (1, 9), (1, 9)):
        died(policy, worker, [line, 100 + line], others=(1 - worker,))
    one = RecoveryPolicy(FailureLog(tmp_path / "trouble.jsonl"), EngineConfig())
    assert one.suspects_of(0).lines == {4, 104, 9, 109}
    assert two_workers(FailureLog(tmp_path / "trouble.jsonl")).reserved() == {4: 0, 104: 0, 9: 1, 109: 1}


def test_each_worker_has_its_own_rung_of_the_memory_ladder(tmp_path: Path) -> None:
    share = EngineConfig(gpu_memory_utilization=0.46)
    shares = [(share, 2), (share, 2)]
    log = FailureLog(tmp_path / "trouble.jsonl")
    policy = RecoveryPolicy(log, EngineConfig(), shares=shares)
    for _ in range(3):
        policy.engine_died(
            OutOfMemoryError("out of memory"),
            [1],
            Progress(0, 0),
            settings_of(EngineConfig()),
            had_own_process=True,
            death=WorkerDeath(1, (0,)),
        )
    assert policy.config_of(0) == share
    assert policy.config_of(1).gpu_memory_utilization == pytest.approx(0.41), "a tenth, divided by two workers"
    later = RecoveryPolicy(FailureLog(tmp_path / "trouble.jsonl"), EngineConfig(), shares=shares)
    assert later.config_of(0) == share
    assert later.config_of(1) == policy.config_of(1)
