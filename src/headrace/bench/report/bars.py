"""Horizontal bars: one value a row with its interval, or parts that add up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.bench.report.scales import Axis, scale
from headrace.bench.report.svg import colour, element, line, marker, shortened, svg, text, text_width, whisker

WIDTH = 640
ROW, BAR_HEIGHT = 30, 18.0
TOP, BOTTOM = 8, 50
MAX_LABEL = 30
MAX_OVER_VALUES = 1.5  # how far an interval may stretch the axis beyond the largest value


@dataclass(frozen=True, slots=True)
class Bar:
    """`value` is None where there is nothing to draw; then `shown` says why."""

    label: str
    value: float | None
    shown: str = ""  # written after the bar
    low: float | None = None
    high: float | None = None
    place: int = 0  # of its colour


@dataclass(frozen=True, slots=True)
class Stack:
    """Parts of one row, in the order of the chart's names."""

    label: str
    parts: Sequence[float]
    shown: str = ""


def bar_chart(
    bars: Sequence[Bar],
    axis: Axis,
    *,
    title: str,
    mark: float | None = None,
    are_dots: bool = False,
) -> str:
    """One row for each bar, in the given order. `mark` is a line to compare with, such as a ratio of 1.

    With `are_dots` values are dots, for quantities that do not start at 0, such as ratios.
    """
    left = _label_width([bar.label for bar in bars])
    right = max((text_width(bar.shown, 12.5) for bar in bars if bar.value is not None), default=0.0) + 16
    base = TOP + ROW * len(bars)
    finite = _shown_values(bars, mark)
    x = scale(axis, finite, left, max(left + 80, WIDTH - right))
    parts = _grid(axis, x.ticks, x.labels(), [x.place(tick) for tick in x.ticks], base)
    for row, bar in enumerate(bars):
        middle = TOP + ROW * row + ROW / 2
        parts.append(text(left - 9, middle + 4.5, shortened(bar.label, MAX_LABEL), "name", anchor="end"))
        if bar.value is None or not math.isfinite(bar.value):
            parts.append(text(left + 8, middle + 4.5, shortened(bar.shown or "not available", 70), "quiet"))
            continue
        at = x.place(bar.value)
        tip = at
        if not are_dots:
            start, end = sorted((x.place(x.low if axis.is_log else 0.0), at))
            box = {"x": start, "y": middle - BAR_HEIGHT / 2, "width": max(1.0, end - start), "height": BAR_HEIGHT}
            fill = {"rx": "2", "fill": colour(bar.place)}
            parts.append(element("rect", {**box, **fill}, title=f"{bar.label}: {bar.shown}"))
            tip = end
        if bar.low is not None and bar.high is not None:
            parts.append(whisker(middle, x.place(bar.low), x.place(bar.high), is_horizontal=True))
            tip = max(tip, x.place(bar.high))
        if are_dots:
            parts.append(marker(at, middle, bar.place, title=f"{bar.label}: {bar.shown}"))
        parts.append(text(tip + 9, middle + 4.5, bar.shown, "name"))
    if mark is not None:
        parts.insert(0, line(x.place(mark), TOP - 4, x.place(mark), base, "limit"))
    return svg(parts, width=WIDTH, height=base + BOTTOM, title=title)


def stacked_chart(
    stacks: Sequence[Stack],
    names: Sequence[str],
    axis: Axis,
    *,
    title: str,
    places: Sequence[int] | None = None,
) -> str:
    """One row for each stack, with a legend of the parts."""
    colours = places or range(len(names))
    left = _label_width([stack.label for stack in stacks])
    right = max((text_width(stack.shown, 12.5) for stack in stacks), default=0.0) + 20
    top = TOP + 24.0
    base = top + ROW * len(stacks)
    x = scale(axis, [sum(stack.parts) for stack in stacks], left, max(left + 80, WIDTH - right))
    parts = _grid(axis, x.ticks, x.labels(), [x.place(tick) for tick in x.ticks], base, top)
    at = 10.0
    for name, place in zip(names, colours, strict=True):
        parts.append(
            element("rect", {"x": at, "y": 4.0, "width": 13.0, "height": 13.0, "rx": "2", "fill": colour(place)})
        )
        parts.append(text(at + 19, 15, name, "name"))
        at += 19 + text_width(name, 12.5) + 20
    for row, stack in enumerate(stacks):
        middle, filled = top + ROW * row + ROW / 2, 0.0
        parts.append(text(left - 9, middle + 4.5, shortened(stack.label, MAX_LABEL), "name", anchor="end"))
        for name, place, value in zip(names, colours, stack.parts, strict=True):
            if value > 0:
                start, end = x.place(filled), x.place(filled + value)
                box = {"x": start, "y": middle - BAR_HEIGHT / 2, "width": max(1.5, end - start - 1)}
                fill = {"height": BAR_HEIGHT, "fill": colour(place)}
                parts.append(element("rect", {**box, **fill}, title=f"{stack.label}, {name}: {value:,.6g}"))
                filled += value
        parts.append(text(x.place(filled) + 8, middle + 4.5, stack.shown, "name"))
    return svg(parts, width=WIDTH, height=base + BOTTOM, title=title)


def _shown_values(bars: Sequence[Bar], mark: float | None) -> list[float]:
    """What the axis must show. A very wide interval is cut at its edge: it must not make all bars tiny."""
    values = [bar.value for bar in bars if bar.value is not None and math.isfinite(bar.value)]
    most = MAX_OVER_VALUES * max(map(abs, values), default=0.0)
    edges = [edge for bar in bars for edge in (bar.low, bar.high) if edge is not None and math.isfinite(edge)]
    return [*values, *(max(-most, min(edge, most)) for edge in edges), *([] if mark is None else [mark])]


def _label_width(labels: Sequence[str]) -> float:
    return 20 + max((text_width(shortened(label, MAX_LABEL), 12.5) for label in labels), default=0.0)


def _grid(
    axis: Axis, ticks: Sequence[float], labels: Sequence[str], places: Sequence[float], base: float, top: float = TOP
) -> list[str]:
    parts: list[str] = []
    for value, label, at in zip(ticks, labels, places, strict=True):
        parts.append(line(at, top, at, base, "base" if value == 0 else "grid"))
        parts.append(text(at, base + 18, label, "tick", anchor="middle"))
    middle = (places[0] + places[-1]) / 2 if places else WIDTH / 2
    parts.append(text(middle, base + 40, axis.label, "axis", anchor="middle"))
    return parts
