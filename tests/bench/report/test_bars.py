"""Horizontal bars: lengths, intervals, rows without a value."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from headrace.bench.report.bars import Bar, Stack, bar_chart, stacked_chart
from headrace.bench.report.scales import Axis

SVG = "{http://www.w3.org/2000/svg}"


def widths(chart: str) -> list[float]:
    rects = ET.fromstring(chart).iter(f"{SVG}rect")
    return [float(rect.get("width", "0")) for rect in rects if rect.find(f"{SVG}title") is not None]


def test_a_bar_is_as_long_as_its_value() -> None:
    found = widths(bar_chart([Bar("a", 10.0, "10"), Bar("b", 5.0, "5")], Axis("tokens/s"), title="t"))
    assert found[0] == pytest.approx(2 * found[1], abs=0.2)


def test_a_row_without_a_value_says_why() -> None:
    chart = bar_chart([Bar("a", 10.0, "10"), Bar("b", None, "failed: oom")], Axis("tokens/s"), title="t")
    assert len(widths(chart)) == 1
    assert "failed: oom" in chart


def test_an_interval_is_drawn_around_the_end_of_its_bar() -> None:
    chart = bar_chart([Bar("a", 10.0, "10", low=9.0, high=11.0)], Axis("tokens/s"), title="t")
    assert chart.count('class="whisker"') == 1


def test_a_chart_of_failures_only_can_be_drawn() -> None:
    failed = bar_chart([Bar("a", None, "failed")], Axis("x"), title="t")
    assert ">failed<" in failed and widths(failed) == []
    assert ET.fromstring(bar_chart([], Axis("x"), title="t")).tag.endswith("svg")


def test_parts_of_a_stack_add_up() -> None:
    chart = stacked_chart([Stack("a", [30.0, 10.0]), Stack("b", [40.0, 0.0])], ["x", "y"], Axis("n"), title="t")
    first, second, whole = widths(chart)
    assert first + second + 1 == pytest.approx(whole, abs=0.3)  # one pixel between parts


def test_a_very_wide_interval_does_not_make_bars_tiny() -> None:
    chart = bar_chart([Bar("a", 10.0, "10", low=0.0, high=1e6)], Axis("tokens/s"), title="t")
    assert widths(chart)[0] > 200
