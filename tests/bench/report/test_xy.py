"""Charts of points: places, intervals, labels, and values that cannot be drawn."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from headrace.bench.report.scales import Axis
from headrace.bench.report.svg import spread, standalone
from headrace.bench.report.xy import Limit, Point, Series, Span, cdf, over_time, pareto, xy_chart

SVG = "{http://www.w3.org/2000/svg}"


def drawn(series: list[Series], **options: object) -> ET.Element:
    chart = xy_chart(series, x=Axis("x"), y=Axis("y"), title="a chart", **options)  # type: ignore[arg-type]
    return ET.fromstring(chart)


def texts(chart: ET.Element) -> list[str]:
    return [element.text or "" for element in chart.iter(f"{SVG}text")]


def test_points_lie_in_proportion_to_their_values() -> None:
    chart = drawn([Series("a", [Point(0, 0), Point(5, 5), Point(10, 10)])])
    xs = [float(circle.get("cx", "nan")) for circle in chart.iter(f"{SVG}circle")]
    ys = [float(circle.get("cy", "nan")) for circle in chart.iter(f"{SVG}circle")]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    assert ys[0] > ys[1] > ys[2]


def test_an_interval_is_drawn_as_a_whisker_and_a_band_as_an_area() -> None:
    points = [Point(1, 5, low=4, high=6), Point(2, 7, low=6, high=9)]
    whiskers = [path for path in drawn([Series("a", points)]).iter(f"{SVG}path") if path.get("class") == "whisker"]
    assert len(whiskers) == 2
    assert len(list(drawn([Series("a", points, kind="band")]).iter(f"{SVG}polygon"))) == 1


def test_several_series_have_a_legend_and_one_has_none() -> None:
    one, two = Series("alone", [Point(1, 1)]), Series("other", [Point(2, 2)])
    assert "alone" not in texts(drawn([one]))
    assert {"alone", "other"} <= set(texts(drawn([one, two])))
    assert {"alone", "other"} <= set(texts(drawn([one, two], names_at_ends=True)))


def test_spans_and_limits_are_labelled() -> None:
    shown = texts(
        drawn([Series("a", [Point(0, 1), Point(100, 2)])], spans=[Span(20, 80, "steady")], limits=[Limit(1.5, "SLO")])
    )
    assert {"steady", "SLO"} <= set(shown)


@pytest.mark.parametrize("points", [[], [Point(math.nan, 1)], [Point(1, math.inf)]])
def test_a_chart_without_drawable_points_says_so(points: list[Point]) -> None:
    assert texts(drawn([Series("a", points)])) == ["not available"]


def test_values_that_a_log_axis_cannot_show_are_left_out() -> None:
    axis = Axis("x", is_log=True)
    chart = ET.fromstring(
        xy_chart([Series("a", [Point(0, 1), Point(1, 1), Point(2, 2)])], x=axis, y=Axis("y"), title="t")
    )
    assert len(list(chart.iter(f"{SVG}circle"))) == 2


def test_strings_are_escaped() -> None:
    hostile = '</svg><script>alert("1")</script>'
    chart = xy_chart(
        [Series(hostile, [Point(1, 1, label=hostile, title=hostile)]), Series("b", [Point(2, 2)])],
        x=Axis(hostile),
        y=Axis("y"),
        title=hostile,
    )
    ET.fromstring(chart)
    assert "<script" not in chart


def test_a_distribution_ends_at_100_percent_and_has_few_points() -> None:
    points = cdf(range(10_000))
    assert len(points) <= 200
    assert points[-1].x == 9999 and points[-1].y == 100
    half = min(points, key=lambda point: abs(point.y - 50))
    assert half.x == pytest.approx(5000, abs=60)
    assert cdf([]) == []


def test_a_long_time_series_keeps_its_mean() -> None:
    points = over_time([(float(t), float(t % 2)) for t in range(10_000)])
    assert len(points) <= 400
    assert sum(point.y for point in points) / len(points) == pytest.approx(0.5)


def test_pareto_keeps_what_no_other_point_beats() -> None:
    # (tokens/s, latency): the third is slower and later than the second.
    assert pareto([(100, 10), (200, 20), (150, 25), (300, 60)], y_is_cost=True) == [0, 1, 3]


def test_labels_are_moved_apart_and_keep_their_order() -> None:
    moved = spread([10.0, 11.0, 40.0], 15)
    assert moved[1] - moved[0] >= 15 and moved[2] - moved[1] >= 15 - 1e-9


def test_a_chart_of_its_own_carries_its_style() -> None:
    chart = standalone(xy_chart([Series("a", [Point(1, 1)])], x=Axis("x"), y=Axis("y"), title="t"))
    assert "prefers-color-scheme: dark" in chart
    ET.fromstring(chart)


def test_labels_are_placed_where_they_cover_no_other_label() -> None:
    crowded = [Point(1 + i / 1000, 1, label=f"point {i}") for i in range(4)]
    shown = [
        each
        for each in texts(drawn([Series("a", [*crowded, Point(9, 9, label="far")])]))
        if each.startswith(("point", "far"))
    ]
    assert shown == ["point 0", "point 1", "far"]  # above, below, and no room for the others


def test_labels_go_below_their_points_if_asked() -> None:
    def height(series: Series) -> float:
        found = [each for each in drawn([series]).iter(f"{SVG}text") if each.text == "here"]
        return float(found[0].get("y", "nan"))

    points = [Point(1, 5, label="here"), Point(2, 9)]
    assert height(Series("a", points)) < height(Series("a", points, is_labelled_below=True))


def test_a_quiet_series_is_drawn_and_not_named() -> None:
    series = [Series("loud", [Point(1, 1), Point(2, 2)]), Series("other", [Point(1, 2)], is_quiet=True)]
    chart = xy_chart(series, x=Axis("x"), y=Axis("y"), title="t")
    assert ">loud</text>" in chart and ">other</text>" not in chart
    assert chart.count("quiet-mark") == 1


def test_a_series_without_markers_has_none_in_the_legend_either() -> None:
    def chart(*, is_marked: bool) -> str:
        line = Series("line", [Point(1, 1), Point(2, 2)], is_marked=is_marked)
        return xy_chart([line, Series("p", [Point(1, 2)])], x=Axis("x"), y=Axis("y"), title="t")

    assert chart(is_marked=True).count('class="mark"') - chart(is_marked=False).count('class="mark"') == 3
