"""Intervals: how often they hold the true ratio, on simulated rounds and requests."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.bench import statistics
from headrace.bench.statistics import (
    mean_interval,
    ratio_of_percentiles,
    ratio_of_rounds,
    ratio_of_shares,
    ratios_of_pooled,
)


@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize("num_rounds", [3, 5, 10])
def test_95_percent_of_the_intervals_hold_the_true_ratio(num_rounds: int, is_paired: bool) -> None:
    rng = np.random.default_rng(num_rounds)
    hits, trials = 0, 400
    for _ in range(trials):
        drift = rng.normal(0, 0.05, num_rounds) if is_paired else 0
        before = 1000 * (1 + drift + rng.normal(0, 0.02, num_rounds))
        after = 1100 * (1 + drift + rng.normal(0, 0.02, num_rounds))
        found = ratio_of_rounds(list(before), list(after), is_paired=is_paired)
        assert found is not None
        hits += found.holds(1.1)
    assert 0.92 <= hits / trials <= 0.995


def test_pairs_cancel_what_both_sides_saw() -> None:
    rng = np.random.default_rng(0)
    drift = rng.normal(0, 0.1, 6)
    before, after = 1000 * (1 + drift), 1050 * (1 + drift) * (1 + rng.normal(0, 0.002, 6))
    paired = ratio_of_rounds(list(before), list(after), is_paired=True)
    apart = ratio_of_rounds(list(before), list(after))
    assert paired is not None and apart is not None
    assert not paired.holds(1.0) and apart.holds(1.0)


def test_the_same_numbers_give_the_same_interval() -> None:
    assert ratio_of_rounds([1, 2, 3], [2, 3, 4]) == ratio_of_rounds([1, 2, 3], [2, 3, 4])


def test_one_round_has_no_interval() -> None:
    assert ratio_of_rounds([1000.0], [1100.0, 1110.0]) is None
    assert mean_interval([1000.0]) is None
    assert ratio_of_rounds([0.0, 0.0], [1.0, 1.0]) is None


def test_equal_rounds_have_a_ratio_without_width() -> None:
    found = ratio_of_rounds([10.0, 10.0], [11.0, 11.0])
    assert found is not None
    assert (found.low, found.value, found.high) == pytest.approx((1.1, 1.1, 1.1))


def test_the_interval_of_a_mean_is_that_of_student() -> None:
    found = mean_interval([9.0, 10.0, 11.0])
    assert found is not None
    assert found.high - found.value == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    noisy = mean_interval([1.0, 9.0])
    assert noisy is not None and noisy.low == 0.0  # a rate is not negative


@pytest.mark.parametrize("percent", [50, 95])
def test_percentiles_of_requests_hold_the_true_ratio(percent: float) -> None:
    rng = np.random.default_rng(1)
    hits, trials = 0, 60
    for _ in range(trials):
        found = ratio_of_percentiles(list(rng.lognormal(0, 0.5, 300)), list(1.2 * rng.lognormal(0, 0.5, 300)), percent)
        assert found is not None
        hits += found.holds(1.2)
    assert hits / trials >= 0.88


def test_pooled_percentiles_are_those_of_numpy() -> None:
    rng = np.random.default_rng(2)
    before = [list(rng.lognormal(0, 0.3, 40)) for _ in range(200)]
    after = [list(1.5 * rng.lognormal(0, 0.3, 40)) for _ in range(200)]
    (found,) = ratios_of_pooled(before, after, [99])
    assert found is not None
    exact = np.percentile(np.concatenate(after), 99) / np.percentile(np.concatenate(before), 99)
    assert found.value == pytest.approx(exact)
    assert found.holds(1.5) and 0.005 < found.high - found.low < 0.3


def test_gaps_of_one_request_are_not_independent() -> None:
    """Requests differ, gaps within one do not: resampling gaps alone would give an interval that is far too narrow."""
    rng = np.random.default_rng(3)
    before = [[float(speed)] * 100 for speed in rng.lognormal(0, 0.5, 50)]
    after = [[float(speed)] * 100 for speed in rng.lognormal(0, 0.5, 50)]
    (found,) = ratios_of_pooled(before, after, [50])
    assert found is not None
    assert found.holds(1.0) and found.high / found.low > 1.2


def test_the_shortcut_has_the_distribution_of_real_resamples() -> None:
    rng = np.random.default_rng(4)
    values = np.sort(rng.lognormal(0, 0.5, 37))
    for percent in (0, 50, 90, 99, 100):
        real = np.percentile(values[rng.integers(37, size=(4000, 37))], percent, axis=1)
        short = statistics._resampled(values, percent, rng)
        for edge in (5, 25, 50, 75, 95):
            assert np.percentile(short, edge) == pytest.approx(np.percentile(real, edge), rel=0.06)


def test_many_requests_are_resampled_within_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    requests = [list(rng.lognormal(0, 0.5, 5)) for _ in range(100)]
    (whole,) = ratios_of_pooled(requests, requests, [50])
    monkeypatch.setattr(statistics, "MAX_RESAMPLED", 10_000)
    (parts,) = ratios_of_pooled(requests, requests, [50])
    assert whole is not None and parts is not None
    assert parts.low == pytest.approx(whole.low, rel=0.05)


def test_shares_that_are_complete_on_both_sides_do_not_differ() -> None:
    found = ratio_of_shares((200, 200), (200, 200))
    assert found is not None and found.holds(1.0)
    worse = ratio_of_shares((200, 200), (150, 200))
    assert worse is not None and worse.high < 1.0
    assert ratio_of_shares((0, 10), (5, 10)) is None
