from __future__ import annotations

from collections.abc import Sequence
from random import Random

from headrace.tune.confirm import MAX_ROUNDS, MIN_ROUNDS, ConfirmRound, judge, needs_more, noise_of

NAMES = ["a", "b"]


def rounds_of(gains: Sequence[float], *, noise: float, seed: int, count: int | None = None) -> list[ConfirmRound]:
    """Rounds with a level of their own, until no more are wanted."""
    rng, rounds = Random(seed), list[ConfirmRound]()
    while needs_more(rounds, NAMES) if count is None else len(rounds) < count:
        level = 1 + 0.05 * rng.gauss(0, 1)
        first, again, *others = (level * gain * (1 + noise * rng.gauss(0, 1)) for gain in (1.0, 1.0, *gains))
        rounds.append(ConfirmRound(first, again, dict(zip(NAMES, others, strict=True))))
    return rounds


def test_a_gain_above_the_noise_is_shown() -> None:
    found = judge(rounds_of([1.2, 1.1], noise=0.02, seed=1), NAMES)
    assert found is not None and found.best == "a" and found.verdict == "tuned"
    assert found.interval.low < 1.2 < found.interval.high


def test_equal_configs_show_no_difference() -> None:
    claims = 0
    for seed in range(100):
        found = judge(rounds_of([1.0, 1.0], noise=0.03, seed=seed), NAMES)
        claims += found is not None and found.is_shown
    assert claims <= 5


def test_a_slower_config_leaves_the_default() -> None:
    found = judge(rounds_of([0.8, 0.7], noise=0.02, seed=1), NAMES)
    assert found is not None and found.verdict == "the default is best"


def test_a_gain_below_the_noise_floor_is_not_shown() -> None:
    """The interval of the config is narrow and above 1, but two equal defaults differ by more."""
    rounds = [ConfirmRound(1.0 + offset, 1.0 - offset, {"a": 1.03}) for offset in (0.1, -0.1, 0.1, -0.1, 0.1)]
    found, noise = judge(rounds, ["a"]), noise_of(rounds)
    assert found is not None and noise is not None
    assert found.interval.low > 1.0 and found.interval.value - 1 < noise.floor
    assert found.verdict == "no difference shown"


def test_few_noisy_rounds_ask_for_more() -> None:
    assert len(rounds_of([1.2, 1.1], noise=0.001, seed=1)) == MIN_ROUNDS
    assert len(rounds_of([1.2, 1.1], noise=0.1, seed=1)) == MAX_ROUNDS


def test_two_rounds_confirm_nothing() -> None:
    found = judge(rounds_of([1.2, 1.1], noise=0.001, seed=1, count=2), NAMES)
    assert found is not None and found.verdict == "not confirmed"
    assert judge(rounds_of([1.2, 1.1], noise=0.001, seed=1, count=1), NAMES) is None


def test_the_noise_floor_is_half_of_the_interval_of_equal_settings() -> None:
    noise = noise_of(rounds_of([1.0, 1.0], noise=0.02, seed=4))
    assert noise is not None
    assert noise.floor == (noise.interval.high - noise.interval.low) / 2
    assert noise.as_json()["num_rounds"] == noise.num_rounds
