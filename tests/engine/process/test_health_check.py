from __future__ import annotations

import pytest

from headrace.engine.process.engine_process import ProcessHealth
from headrace.engine.process.health_check import HealthCheck
from headrace.engine.process.supervisor import Supervision, supervision
from headrace.errors import ConfigError


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class CheckedProcess:
    """A process second by second: whether it sends a heartbeat, and whether it finishes a step."""

    def __init__(self, timeout_s: float) -> None:
        self.clock = Clock()
        self.check = HealthCheck(timeout_s, self.clock)
        self.health = ProcessHealth()

    def seconds(self, number: int, *, beats: bool, works: bool = False, has_work: bool = True) -> str | None:
        problem = None
        for _ in range(number):
            self.clock.now += 1.0
            if beats:
                last = self.health
                num_steps = last.num_finished_steps + works
                self.health = ProcessHealth(last.num_frames + 1, last.num_heartbeats + 1, num_steps, has_work)
            problem = self.check.problem(self.health)
            if problem is not None:
                break
        return problem


def test_a_process_that_finishes_steps_is_healthy() -> None:
    assert CheckedProcess(10).seconds(1_000, beats=True, works=True) is None


def test_a_process_without_work_is_healthy() -> None:
    assert CheckedProcess(10).seconds(1_000, beats=True, has_work=False) is None


def test_a_process_that_finishes_no_step_is_hung_after_the_timeout() -> None:
    process = CheckedProcess(10)
    assert process.seconds(5, beats=True, works=True) is None
    assert process.seconds(10, beats=True) is None
    problem = process.seconds(1, beats=True)
    assert problem == "it finished no step for 11 s, although it had work"


def test_a_step_in_time_starts_the_count_again() -> None:
    process = CheckedProcess(10)
    for _ in range(5):
        assert process.seconds(9, beats=True) is None
        assert process.seconds(1, beats=True, works=True) is None


def test_a_silent_process_is_reported_after_the_timeout_even_without_work() -> None:
    process = CheckedProcess(10)
    assert process.seconds(3, beats=True, has_work=False) is None
    assert process.seconds(10, beats=False) is None
    assert process.seconds(1, beats=False) == "its process sent no heartbeat for 11 s"


def test_a_front_that_was_suspended_itself_does_not_blame_the_engine() -> None:
    process = CheckedProcess(10)
    process.seconds(3, beats=True)
    process.clock.now += 3_600.0
    assert process.check.problem(process.health) is None
    assert process.seconds(1, beats=True, works=True) is None


def test_invalid_rules_are_refused() -> None:
    with pytest.raises(ConfigError, match="step_timeout_s must be above 0, got 0"):
        supervision(True, step_timeout_s=0, max_restarts=None)
    with pytest.raises(ConfigError, match="max_engine_restarts must be at least 0, got -1"):
        supervision(True, step_timeout_s=None, max_restarts=-1)
    with pytest.raises(ConfigError, match="add supervised=True"):
        supervision(False, step_timeout_s=5.0, max_restarts=None)
    assert supervision(False, step_timeout_s=None, max_restarts=None) is None
    rules = supervision(True, step_timeout_s=5.0, max_restarts=None)
    assert rules == Supervision(step_timeout_s=5.0)
