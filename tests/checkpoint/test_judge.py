"""Tolerances come from the recorded noise, with a stated minimum."""

from __future__ import annotations

import random

import pytest

from headrace.checkpoint.judge import BY_NAME, LATENCY, RATE, judge, tolerance_of

OUTPUT, TTFT = BY_NAME["output_tokens_per_s"], BY_NAME["ttft_p50"]


def rounds(name: str, *values: float) -> list[dict[str, float]]:
    return [{name: value} for value in values]


def test_quiet_rounds_have_the_minimum() -> None:
    assert tolerance_of([100.0, 100.1, 99.9], 3, OUTPUT)[0] == RATE.with_rounds
    assert tolerance_of([100.0, 100.1, 99.9], 3, TTFT)[0] == LATENCY.with_rounds
    assert tolerance_of([100.0], 3, OUTPUT) == (
        RATE.of_one_round,
        "one recorded round: the minimum without known noise",
    )


def test_noisy_rounds_have_a_wider_tolerance_and_more_rounds_a_narrower_one() -> None:
    noisy, basis = tolerance_of([100.0, 110.0, 90.0], 3, OUTPUT)
    assert noisy == pytest.approx(4.303 * 10 * (2 / 3) ** 0.5 / 100)
    assert basis == "noise of 3 recorded rounds"
    assert (
        tolerance_of([100.0, 110.0, 90.0] * 3, 9, OUTPUT)[0] < noisy < tolerance_of([100.0, 110.0, 90.0], 1, OUTPUT)[0]
    )


@pytest.mark.parametrize(
    ("name", "now", "verdict"),
    [
        ("output_tokens_per_s", 96.0, "holds"),
        ("output_tokens_per_s", 94.0, "worse"),
        ("output_tokens_per_s", 120.0, "better"),
        ("ttft_p50", 109.0, "holds"),
        ("ttft_p50", 111.0, "worse"),
        ("ttft_p50", 50.0, "better"),
        ("success_share", 98.9, "worse"),
    ],
)
def test_a_figure_may_be_worse_by_its_tolerance(name: str, now: float, verdict: str) -> None:
    found = judge("load", name, rounds(name, 100.0, 100.0, 100.0), rounds(name, now))
    assert found is not None
    assert found.verdict == verdict


def test_a_figure_that_is_gone_is_missing_and_one_that_never_was_is_not_judged() -> None:
    found = judge("load", "ttft_p50", rounds("ttft_p50", 1.0), [])
    assert found is not None
    assert found.verdict == "missing"
    assert judge("load", "ttft_p50", [], rounds("ttft_p50", 1.0)) is None


def test_rounds_that_say_nothing_are_too_noisy() -> None:
    found = judge("load", OUTPUT.name, rounds(OUTPUT.name, 100.0, 160.0), rounds(OUTPUT.name, 90.0))
    assert found is not None
    assert found.verdict == "too noisy"


def test_equal_engines_hold_and_a_slower_one_does_not() -> None:
    """With 10 % of noise between rounds, no more than 1 in 20 verifications of the same engine fail."""
    rng = random.Random(1)

    def measured(mean: float) -> list[dict[str, float]]:
        return rounds(OUTPUT.name, *(rng.gauss(mean, 10.0) for _ in range(5)))

    def share_worse(mean: float) -> float:
        judged = [judge("load", OUTPUT.name, measured(100.0), measured(mean)) for _ in range(400)]
        return sum(each is not None and each.verdict == "worse" for each in judged) / 400

    assert share_worse(100.0) <= 0.05
    assert share_worse(60.0) >= 0.95
