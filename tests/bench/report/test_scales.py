"""Axes: ticks at round numbers that cover the values, on linear and log scales."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.report.scales import Axis, compact, log_ticks, round_ticks, scale, tick_labels

FINITE = st.floats(-1e9, 1e9, allow_nan=False).map(lambda value: round(value, 6))


@pytest.mark.parametrize(
    "low, high, ticks",
    [
        (0, 10, (0, 2, 4, 6, 8, 10)),
        (0, 4768, (0, 1000, 2000, 3000, 4000, 5000)),
        (0, 0.93, (0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        (-3, 3, (-4, -2, 0, 2, 4)),
    ],
)
def test_ticks_are_round_numbers_around_the_values(low: float, high: float, ticks: tuple[float, ...]) -> None:
    assert round_ticks(low, high) == pytest.approx(ticks)


def test_a_log_axis_has_ticks_at_1_2_and_5_over_few_decades_and_powers_of_ten_over_many() -> None:
    assert log_ticks(9, 210) == (10, 20, 50, 100, 200)
    assert log_ticks(0.5, 20_000) == (1, 10, 100, 1000, 10_000)
    assert len(log_ticks(310, 390)) >= 2


def test_labels_have_the_decimals_that_tell_ticks_apart() -> None:
    assert tick_labels((0.0, 0.25, 0.5)) == ["0.00", "0.25", "0.50"]
    assert tick_labels((0.0, 20_000.0)) == ["0", "20k"]
    assert compact(2_500_000) == "2.5M"


@given(st.lists(FINITE, max_size=8))
def test_every_value_has_a_place_within_the_axis(values: list[float]) -> None:
    found = scale(Axis("x"), values, 40, 600)
    assert all(40 <= found.place(value) <= 600 for value in values)
    assert found.low < found.high
    assert list(found.ticks) == sorted(set(found.ticks))


@given(st.lists(st.floats(1e-6, 1e9), max_size=8))
def test_every_positive_value_has_a_place_on_a_log_axis(values: list[float]) -> None:
    found = scale(Axis("x", is_log=True), [*values, 0.0, math.inf], 40, 600)
    assert all(39.999 <= found.place(value) <= 600.001 for value in values)


def test_y_grows_upwards() -> None:
    found = scale(Axis("y"), [0, 10], 300, 10)
    assert found.place(0) == 300 and found.place(10) == 10
