from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.tune.budget import Budget, parse_budget
from headrace.tune.trial import Trial
from tests.tune.builders import Clock


def a_trial(num_requests: int, seconds: float, start_s: float | None = None) -> Trial:
    return Trial("race", 1, 0, num_requests, 1.0, {}, "", seconds, start_s)


@pytest.mark.parametrize(("text", "expected"), [("90s", 90), ("20m", 1200), ("1.5h", 5400), ("45", 45), ("2 min", 120)])
def test_budgets_have_units(text: str, expected: float) -> None:
    assert parse_budget(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "-5m", "0", "5 days"])
def test_other_budgets_are_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match="20m"):
        parse_budget(text)


def test_a_trial_takes_its_start_and_its_requests() -> None:
    budget = Budget(1200.0, Clock())
    budget.add(a_trial(100, 15.0, start_s=5.0))
    assert budget.trial_s(200) == pytest.approx(25.0)


def test_a_round_has_a_sixtieth_of_the_budget() -> None:
    budget = Budget(1200.0, Clock())
    budget.add(a_trial(100, 15.0, start_s=5.0))  # a request takes 0.1 s
    assert budget.num_requests(1.0, 1000, 8) == 150
    assert budget.num_requests(1.0, 120, 8) == 120


def test_a_round_fills_the_largest_batch_three_times() -> None:
    budget = Budget(1200.0, Clock())
    budget.add(a_trial(100, 15.0, start_s=5.0))
    assert budget.num_requests(1.0, 1000, 128) == 384


def test_a_short_budget_has_a_short_list_and_still_confirms() -> None:
    clock = Clock()
    budget = Budget(120.0, clock)
    budget.add(a_trial(100, 10.0))
    assert budget.num_configs(100) == 4
    assert budget.has_time_for_race(100)
    budget.go_on_from(55.0)
    assert not budget.has_time_for_race(100)
    assert budget.has_time_for_round(4, 100) and not budget.has_time_to_confirm(100)


def test_time_of_an_earlier_run_counts() -> None:
    clock = Clock(now=1000.0)
    budget = Budget(600.0, clock)
    budget.go_on_from(200.0)
    clock.now += 50.0
    assert budget.mark() == 250.0
    assert budget.left_s == 350.0
