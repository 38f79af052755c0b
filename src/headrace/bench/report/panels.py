"""Panels of grouped vertical bars over one scale: the figures of README and docs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.bench.report.svg import line, svg, text

WIDTH, MARGIN, GAP = 980, 28, 20
TOP, PLOT_HEIGHT, BOTTOM = 122, 230, 62
LABEL_LINE = 12  # height of a value's label


@dataclass(frozen=True, slots=True)
class GroupBar:
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Group:
    """The bars of one place on the x axis."""

    label: str
    bars: tuple[GroupBar, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """Groups under one title."""

    title: str
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """Colours of bars by name, the bar whose label is bold, and the bar that is the unit and has no label."""

    colours: Mapping[str, str]
    own: str | None = None
    unit: str | None = None


def panel_chart(panels: Sequence[Panel], look: Look, *, title: str, subtitle: str, names: Mapping[str, str]) -> str:
    """Panels side by side over one scale, each as wide as its number of groups asks for."""
    most = max(bar.value for panel in panels for group in panel.groups for bar in group.bars)
    top_value = int(most) + 1
    height = TOP + PLOT_HEIGHT + BOTTOM
    num_groups = sum(len(panel.groups) for panel in panels)
    group_width = (WIDTH - 2 * MARGIN - 24 - GAP * (len(panels) - 1)) / num_groups
    base = TOP + PLOT_HEIGHT
    parts = [
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10"/>',
        text(MARGIN, 38, title, "title"),
        text(MARGIN, 60, subtitle, "quiet"),
        *_legend(names, look),
    ]
    for value in range(top_value + 1):
        y = base - PLOT_HEIGHT * value / top_value
        parts.append(line(MARGIN + 24, y, WIDTH - MARGIN, y, "base" if value == 0 else "grid"))
        parts.append(text(MARGIN + 16, y + 4, str(value), "quiet", anchor="end"))
    left = MARGIN + 24.0
    for panel in panels:
        width = group_width * len(panel.groups)
        parts.append(text(left + width / 2, base + 46, panel.title, "panel", anchor="middle"))
        for place, group in enumerate(panel.groups):
            parts += _group(group, look, left + place * group_width, group_width, base, PLOT_HEIGHT / top_value)
        left += width + GAP
    return svg(parts, width=WIDTH, height=height, title=title)


def _group(group: Group, look: Look, left: float, width: float, base: float, unit: float) -> Iterable[str]:
    bar_width = min(28.0, (width - 5) / len(group.bars))
    start = left + (width - bar_width * len(group.bars)) / 2
    for place, bar in enumerate(group.bars):
        x, height = start + place * bar_width, bar.value * unit
        yield (
            f'<rect x="{x + 1:.1f}" y="{base - height:.1f}" width="{bar_width - 2:.1f}" height="{height:.1f}" rx="2" '
            f'fill="{look.colours[bar.name]}"/>'
        )
    labelled = [(place, bar) for place, bar in enumerate(group.bars) if bar.name != look.unit]
    heights = _label_heights([bar.value * unit + 5 for _, bar in labelled])
    for (place, bar), height in zip(labelled, heights, strict=True):
        kind = "value own" if bar.name == look.own else "value"
        yield text(start + (place + 0.5) * bar_width, base - height, _shown(bar.value), kind, anchor="middle")
    yield text(left + width / 2, base + 20, group.label, "label", anchor="middle")


def _label_heights(heights: Sequence[float]) -> list[float]:
    """Labels are wider than bars: of two neighbours at nearly the same height, the higher one moves up a line."""
    moved = list(heights)
    for i in range(1, len(moved)):
        low, high = sorted((i - 1, i), key=lambda place: moved[place])
        moved[high] = max(moved[high], moved[low] + LABEL_LINE)
    return moved


def _shown(value: float) -> str:
    return f"{value:.1f}" if value >= 2 else f"{value:.2f}"  # near 1 the second digit matters


def _legend(names: Mapping[str, str], look: Look) -> Iterable[str]:
    x = float(MARGIN)
    for name, shown in names.items():
        yield f'<rect x="{x:.1f}" y="78" width="13" height="13" rx="2" fill="{look.colours[name]}"/>'
        yield text(x + 19, 89, shown, "label")
        x += 19 + 7.2 * len(shown) + 26
