"""Charts of points over two axes: lines with intervals, scatter plots, distributions, time series."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headrace.bench.report.scales import Axis, Scale, scale
from headrace.bench.report.svg import colour, element, line, marker, shortened, spread, svg, text, text_width, whisker

Kind = Literal["line", "points", "band"]

WIDTH, HEIGHT = 640, 330
TOP, BOTTOM, RIGHT = 16, 50, 20
LEGEND_LINE = 21
MAX_MARKED = 24  # a line of more points has one marker only, which the legend needs
MAX_POINTS = 400  # of a time series, after which neighbours are averaged
MAX_QUANTILES = 200  # of a distribution
MAX_NAME = 26


@dataclass(frozen=True, slots=True)
class Point:
    """`low` and `high` are an interval of y. `label` is written beside the point, `title` shown when pointed at."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    label: str = ""
    title: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Points in drawing order. `band`: a line with its intervals as an area."""

    name: str
    points: Sequence[Point]
    kind: Kind = "line"
    is_dashed: bool = False
    place: int | None = None  # of its colour; default: its place in the chart
    is_labelled_below: bool = False  # where labels of points go if there is room: another series is above
    is_marked: bool = True  # whether its points have markers
    is_quiet: bool = False  # grey, thin and not in the legend: context for the other series


@dataclass(frozen=True, slots=True)
class Span:
    """A shaded part of the x axis."""

    start: float
    end: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Limit:
    """A line across the chart at a value of one axis."""

    value: float
    label: str
    axis: Literal["x", "y"] = "y"


def xy_chart(
    series: Sequence[Series],
    *,
    x: Axis,
    y: Axis,
    title: str,
    spans: Sequence[Span] = (),
    limits: Sequence[Limit] = (),
    names_at_ends: bool = False,
    width: float = WIDTH,
    height: float = HEIGHT,
) -> str:
    """Draw series over two axes. With one series there is no legend; `names_at_ends` writes names beside the lines."""
    kept = [_drawable(each, place, x, y) for place, each in enumerate(series)]
    kept = [each for each in kept if each.points]
    if not kept:
        return _empty(title, width, height / 2)
    names_at_ends = names_at_ends and len(kept) > 1
    named = [each for each in kept if not each.is_quiet]
    legend = [] if names_at_ends or len(kept) < 2 or not named else _legend(named, width)
    top = TOP + (legend[-1].row + 1) * LEGEND_LINE if legend else TOP
    right = max(text_width(shortened(each.name, MAX_NAME), 12.5) for each in kept) + 16 if names_at_ends else RIGHT
    values = [
        value
        for each in kept
        for point in each.points
        for value in (point.y, point.low, point.high)
        if value is not None and math.isfinite(value)
    ]
    y_limits = [limit.value for limit in limits if limit.axis == "y"]
    y_scale = scale(y, [*values, *y_limits], height - BOTTOM, top)
    left = 34 + max(text_width(label, 12) for label in y_scale.labels())
    x_values = [point.x for each in kept for point in each.points]
    x_limits = [limit.value for limit in limits if limit.axis == "x"]
    x_scale = scale(x, [*x_values, *x_limits], left, width - right)
    parts = [_spans(spans, x_scale, y_scale), _frame(x, y, x_scale, y_scale), *map(_legend_entry, legend)]
    parts += [part for each in kept for part in _series(each, x_scale, y_scale, is_alone=len(kept) == 1)]
    parts += [_limit(limit, x_scale, y_scale) for limit in limits]
    parts += _point_labels(kept, x_scale, y_scale)
    if names_at_ends:
        parts += _end_names(kept, x_scale, y_scale)
    return svg([part for part in parts if part], width=width, height=height, title=title)


def cdf(values: Iterable[float]) -> list[Point]:
    """The cumulative distribution of values, as at most MAX_QUANTILES points; shares are in percent."""
    ordered = sorted(value for value in values if math.isfinite(value))
    if not ordered:
        return []
    count = min(len(ordered), MAX_QUANTILES)
    ranks = sorted({round(place * (len(ordered) - 1) / max(1, count - 1)) for place in range(count)})
    return [Point(ordered[rank], 100 * (rank + 1) / len(ordered)) for rank in ranks]


def over_time(rows: Sequence[tuple[float, float]]) -> list[Point]:
    """A time series as at most MAX_POINTS points, each the mean of its neighbours."""
    size = max(1, math.ceil(len(rows) / MAX_POINTS))
    chunks = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [Point(_mean([t for t, _ in chunk]), _mean([value for _, value in chunk])) for chunk in chunks]


def pareto(points: Sequence[tuple[float, float]], *, y_is_cost: bool = False) -> list[int]:
    """Places of the points that no other point beats in one value without losing in the other, by rising x."""
    signed = [(a, -b if y_is_cost else b) for a, b in points]
    best: list[int] = []
    highest = -math.inf
    for place in sorted(range(len(points)), key=lambda place: signed[place], reverse=True):
        if signed[place][1] > highest:
            best.append(place)
            highest = signed[place][1]
    return sorted(best, key=lambda place: points[place])


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    place: int
    kind: Kind
    is_dashed: bool
    is_marked: bool
    x: float
    row: int


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _drawable(series: Series, place: int, x: Axis, y: Axis) -> Series:
    """The series with its colour fixed, without points that have no place on the axes."""
    points = [
        point
        for point in series.points
        if _is_number(point.x)
        and _is_number(point.y)
        and (point.x > 0 or not x.is_log)
        and (point.y > 0 or not y.is_log)
    ]
    return replace(series, points=points, place=place if series.place is None else series.place)


def _empty(title: str, width: float, height: float) -> str:
    return svg(
        [text(width / 2, height / 2, "not available", "quiet", anchor="middle")],
        width=width,
        height=height,
        title=title,
    )


def _frame(x: Axis, y: Axis, x_scale: Scale, y_scale: Scale) -> str:
    """Grid, ticks and names of the axes."""
    left, right, base, top = x_scale.start, x_scale.end, y_scale.start, y_scale.end
    parts = []
    for value, label in zip(y_scale.ticks, y_scale.labels(), strict=True):
        at = y_scale.place(value)
        parts += [line(left, at, right, at, "grid"), text(left - 7, at + 4, label, "tick", anchor="end")]
    parts.append(line(left, base, right, base, "base"))
    free_from = -math.inf
    for value, label in zip(x_scale.ticks, x_scale.labels(), strict=True):
        at, half = x_scale.place(value), text_width(label, 12) / 2
        parts.append(line(at, base, at, base + 4, "base"))
        if at - half > free_from:  # labels of close ticks would overlap
            parts.append(text(at, base + 18, label, "tick", anchor="middle"))
            free_from = at + half + 5
    parts.append(text((left + right) / 2, base + 40, x.label, "axis", anchor="middle"))
    parts.append(text(14, (base + top) / 2, y.label, "axis", anchor="middle", turn=-90))
    return "\n".join(parts)


def _spans(spans: Sequence[Span], x_scale: Scale, y_scale: Scale) -> str:
    parts = []
    for span in spans:
        start, end = x_scale.place(span.start), x_scale.place(span.end)
        box = {"class": "span", "x": start, "y": y_scale.end, "width": max(0.0, end - start)}
        parts.append(element("rect", {**box, "height": y_scale.start - y_scale.end}, title=span.label))
        if span.label and text_width(span.label, 12) < end - start:
            parts.append(text((start + end) / 2, y_scale.start - 8, span.label, "tick", anchor="middle"))
    return "\n".join(parts)


def _limit(limit: Limit, x_scale: Scale, y_scale: Scale) -> str:
    if limit.axis == "x":
        at = x_scale.place(limit.value)
        return line(at, y_scale.start, at, y_scale.end, "limit") + text(
            at + 5, y_scale.end + 12, limit.label, "limit-label"
        )
    at = y_scale.place(limit.value)
    return line(x_scale.start, at, x_scale.end, at, "limit") + text(
        x_scale.start + 6, at - 5, limit.label, "limit-label"
    )


def _series(series: Series, x_scale: Scale, y_scale: Scale, *, is_alone: bool) -> Iterator[str]:
    assert series.place is not None
    points = [(x_scale.place(point.x), y_scale.place(point.y)) for point in series.points]
    if series.kind == "band":
        yield _band(series, x_scale, y_scale)
    if series.kind != "points" and len(points) > 1:
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        dash = {"stroke-dasharray": "6 4"} if series.is_dashed else {}
        stroke = {"fill": "none", "stroke": colour(series.place), "stroke-width": 2.0, "stroke-linejoin": "round"}
        look = {"class": "quiet-line"} if series.is_quiet else stroke
        yield element("path", {"d": path, **look, **dash}, title=series.name)
    for place, ((a, b), point) in enumerate(zip(points, series.points, strict=True)):
        if series.kind != "band" and point.low is not None and point.high is not None:
            yield whisker(a, y_scale.place(point.low), y_scale.place(point.high))
        is_marked = series.kind == "points" or len(points) <= MAX_MARKED
        title = point.title or f"{series.name}: {point.x:.4g}, {point.y:.4g}"
        if series.is_quiet:
            yield element("circle", {"class": "quiet-mark", "cx": a, "cy": b, "r": 3.0}, title=title)
        elif series.is_marked and (is_marked or (place == len(points) // 2 and not is_alone)):
            yield marker(a, b, series.place, title=title)


def _band(series: Series, x_scale: Scale, y_scale: Scale) -> str:
    assert series.place is not None
    edges = [
        (x_scale.place(point.x), y_scale.place(point.low), y_scale.place(point.high))
        for point in series.points
        if point.low is not None and point.high is not None
    ]
    if len(edges) < 2:
        return ""
    around = [(a, high) for a, _, high in edges] + [(a, low) for a, low, _ in reversed(edges)]
    corners = " ".join(f"{a:.1f},{b:.1f}" for a, b in around)
    return element("polygon", {"points": corners, "fill": colour(series.place), "fill-opacity": "0.18"})


def _point_labels(kept: Sequence[Series], x_scale: Scale, y_scale: Scale) -> Iterator[str]:
    """Labels above or below their points; one that would cover another label is left to the point's title."""
    taken: list[tuple[float, float, float]] = []
    for series in kept:
        for point in series.points:
            if not point.label:
                continue
            half = text_width(point.label, 11.5) / 2
            at = min(max(x_scale.place(point.x), x_scale.start + half), max(x_scale.start, x_scale.end - half))
            for offset in (18.0, -10.0) if series.is_labelled_below else (-10.0, 18.0):
                y = y_scale.place(point.y) + offset
                if y < y_scale.start and all(
                    abs(at - other) >= half + width + 2 or abs(y - row) >= 12 for other, row, width in taken
                ):
                    taken.append((at, y, half))
                    yield text(at, y, point.label, "point", anchor="middle")
                    break


def _end_names(kept: Sequence[Series], x_scale: Scale, y_scale: Scale) -> Iterator[str]:
    heights = spread([y_scale.place(each.points[-1].y) for each in kept], 15)
    for each, height in zip(kept, heights, strict=True):
        yield text(x_scale.end + 8, height + 4, shortened(each.name, MAX_NAME), "name")


def _legend(kept: Sequence[Series], width: float) -> list[_Entry]:
    entries, x, row = [], 10.0, 0
    for each in kept:
        assert each.place is not None
        name = shortened(each.name, 2 * MAX_NAME)
        needed = 34 + text_width(name, 12.5)
        if x + needed > width and x > 10:
            x, row = 10.0, row + 1
        entries.append(_Entry(name, each.place, each.kind, each.is_dashed, each.is_marked, x, row))
        x += needed + 14
    return entries


def _legend_entry(entry: _Entry) -> str:
    y = 14.0 + entry.row * LEGEND_LINE
    stroke = {"stroke": colour(entry.place), "stroke-width": 2.0}
    dash = {"stroke-dasharray": "6 4"} if entry.is_dashed else {}
    stripe = "" if entry.kind == "points" else element("path", {"d": f"M{entry.x:.1f} {y:.1f}h22", **stroke, **dash})
    mark = marker(entry.x + 11, y, entry.place) if entry.is_marked else ""
    return stripe + mark + text(entry.x + 29, y + 4.5, entry.name, "name")
