"""Estimates compared with traces whose end is known."""

from __future__ import annotations

import random

import pytest

from headrace.jobs.status.time_left import TokenCosts, TokensLeft, seconds_left

PROMPT_SECONDS, DECODE_SECONDS = 0.0001, 0.002


def trace(mixtures: list[tuple[float, float]]) -> TokenCosts:
    costs = TokenCosts()
    for num_prompt, num_decode in mixtures:
        costs.add(num_prompt, num_decode, PROMPT_SECONDS * num_prompt + DECODE_SECONDS * num_decode)
    return costs


def test_nothing_is_known_before_anything_was_computed() -> None:
    assert seconds_left(TokensLeft(10, 10, 1), TokenCosts(), step_seconds=0.1) is None


def test_prompts_and_answers_have_their_measured_costs() -> None:
    """Answers were most of the work so far, prompts are most of the rest: their tokens differ in cost."""
    rng = random.Random(0)
    costs = trace([(rng.uniform(0, 500), rng.uniform(300, 500)) for _ in range(50)])
    left = TokensLeft(num_prompt_tokens=100_000, num_decode_tokens=1_000, longest=0)
    assert seconds_left(left, costs, step_seconds=0.01) == pytest.approx(12.0, rel=0.01)


def test_if_the_mix_never_changes_all_tokens_cost_the_same() -> None:
    costs = trace([(1000, 100)] * 20)
    left = TokensLeft(num_prompt_tokens=10_000, num_decode_tokens=1_000, longest=0)
    assert seconds_left(left, costs, step_seconds=0.01) == pytest.approx(3.0, rel=0.01)


def test_recent_speed_counts_more_than_old() -> None:
    costs = TokenCosts()
    for _ in range(100):
        costs.add(0, 1000, 1.0)
    for _ in range(100):
        costs.add(0, 1000, 3.0)
    assert costs.seconds_for(0, 1000) == pytest.approx(3.0, rel=0.1)


def test_the_estimate_is_at_least_the_longest_answer() -> None:
    costs = trace([(0, 1000)] * 10)
    tail = TokensLeft(num_prompt_tokens=0, num_decode_tokens=500, longest=400)
    assert seconds_left(tail, costs, step_seconds=0.05) == pytest.approx(20.0)
    body = TokensLeft(num_prompt_tokens=0, num_decode_tokens=50_000, longest=400)
    assert seconds_left(body, costs, step_seconds=0.05) == pytest.approx(100.0)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.95])
def test_the_end_is_estimated_well_at_any_point(share: float) -> None:
    """Eight slots decode a token per step; long answers start first, as the planner orders them."""
    rng = random.Random(1)
    waiting = sorted((rng.choice([20, 40, 200]) for _ in range(400)), reverse=True)
    running: list[int] = []
    history: list[tuple[int, TokensLeft, float]] = []
    costs, step = TokenCosts(), 0
    while waiting or running:
        while waiting and len(running) < 8:
            running.append(waiting.pop(0))
        costs.add(0, len(running), 0.5)
        left = TokensLeft(0, sum(waiting) + sum(running), max([*running, *waiting[:1]]))
        estimate = seconds_left(left, costs, step_seconds=0.5)
        assert estimate is not None
        history.append((step, left, estimate))
        running = [each - 1 for each in running if each > 1]
        step += 1
    at, _, estimate = history[int(share * step)]
    assert estimate == pytest.approx(0.5 * (step - at), rel=0.1)
