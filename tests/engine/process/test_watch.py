from __future__ import annotations

import pytest

from headrace.engine.process.engine_process import VitalSigns
from headrace.engine.process.supervisor import Backoff, Supervision, supervision
from headrace.engine.process.watch import Watch
from headrace.errors import ConfigError


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Patient:
    """A watched process, second by second: `breathe` is a pulse in each, `work` a step."""

    def __init__(self, timeout_s: float) -> None:
        self.clock = Clock()
        self.watch = Watch(timeout_s, self.clock)
        self.signs = VitalSigns()

    def seconds(self, number: int, *, breathes: bool, works: bool = False, has_work: bool = True) -> str | None:
        complaint = None
        for _ in range(number):
            self.clock.now += 1.0
            if breathes:
                num_steps = self.signs.num_finished_steps + works
                self.signs = VitalSigns(self.signs.num_frames + 1, self.signs.num_pulses + 1, num_steps, has_work)
            complaint = self.watch.complaint(self.signs)
            if complaint is not None:
                break
        return complaint


def test_one_that_works_is_well_however_long() -> None:
    assert Patient(10).seconds(1_000, breathes=True, works=True) is None


def test_one_without_work_is_well_however_long() -> None:
    assert Patient(10).seconds(1_000, breathes=True, has_work=False) is None


def test_one_that_lives_but_finishes_no_step_is_hung_after_the_timeout() -> None:
    patient = Patient(10)
    assert patient.seconds(5, breathes=True, works=True) is None
    assert patient.seconds(10, breathes=True) is None
    complaint = patient.seconds(1, breathes=True)
    assert complaint == "it finished no step for 11 s, although it had work"


def test_a_step_in_time_starts_the_count_again() -> None:
    patient = Patient(10)
    for _ in range(5):
        assert patient.seconds(9, breathes=True) is None
        assert patient.seconds(1, breathes=True, works=True) is None


def test_one_that_is_silent_is_gone_after_the_timeout_even_without_work() -> None:
    patient = Patient(10)
    assert patient.seconds(3, breathes=True, has_work=False) is None
    assert patient.seconds(10, breathes=False) is None
    assert patient.seconds(1, breathes=False) == "its process gave no sign of life for 11 s"


def test_a_front_that_stood_still_itself_does_not_blame_the_engine() -> None:
    patient = Patient(10)
    patient.seconds(3, breathes=True)
    patient.clock.now += 3_600.0
    assert patient.watch.complaint(patient.signs) is None
    assert patient.seconds(1, breathes=True, works=True) is None


def test_restarts_wait_twice_as_long_each_and_end_after_the_last() -> None:
    clock = Clock()
    backoff = Backoff(Supervision(max_restarts=4, clock=clock))
    assert [backoff.next_delay_s() for _ in range(6)] == [1.0, 2.0, 4.0, 8.0, None, None]


def test_restarts_long_ago_are_forgotten() -> None:
    clock = Clock()
    backoff = Backoff(Supervision(max_restarts=2, clock=clock))
    assert [backoff.next_delay_s(), backoff.next_delay_s()] == [1.0, 2.0]
    clock.now += 599.0
    assert backoff.next_delay_s() is None
    clock.now += 1.0
    assert backoff.next_delay_s() == 1.0


def test_rules_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="step_timeout_s must be above 0, got 0"):
        supervision(True, step_timeout_s=0, max_restarts=None)
    with pytest.raises(ConfigError, match="max_engine_restarts must be at least 0, got -1"):
        supervision(True, step_timeout_s=None, max_restarts=-1)
    with pytest.raises(ConfigError, match="add supervised=True"):
        supervision(False, step_timeout_s=5.0, max_restarts=None)
    assert supervision(False, step_timeout_s=None, max_restarts=None) is None
    rules = supervision(True, step_timeout_s=5.0, max_restarts=None)
    assert rules is not None and (rules.step_timeout_s, rules.max_restarts) == (5.0, Supervision().max_restarts)
