"""A grid of boxes over two settings: what happened for each pair of values. Each box says it in words too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.bench.report.svg import element, shortened, svg, text, text_width

WIDTH = 640
ROW, GAP = 40.0, 4.0
TOP, BOTTOM = 8.0, 52.0
MAX_LABEL, MAX_CELL = 16, 22

Tone = Literal["good", "bad", "unsure", "plain"]


@dataclass(frozen=True, slots=True)
class Box:
    """`title` is shown when pointed at."""

    text: str
    tone: Tone = "plain"
    title: str = ""


def grid_chart(
    columns: Sequence[str],
    rows: Sequence[str],
    boxes: Mapping[tuple[int, int], Box],
    *,
    x_label: str,
    y_label: str,
    title: str,
) -> str:
    """`boxes` by place of column and row; a pair without a box is empty. The first row is at the bottom."""
    turned = 26.0 if y_label else 8.0
    left = turned + 12 + max((text_width(shortened(row, MAX_LABEL), 12) for row in rows), default=0.0)
    step = (WIDTH - left - 8) / max(1, len(columns))
    height = max(ROW, text_width(y_label, 12.5) / max(1, len(rows)))  # the name of the axis must fit beside the rows
    base = TOP + height * len(rows)
    parts = []
    for place, row in enumerate(rows):
        y = base - height * (place + 1)
        parts.append(text(left - 8, y + height / 2 + 4, shortened(row, MAX_LABEL), "tick", anchor="end"))
        for column in range(len(columns)):
            box = boxes.get((column, place), Box(""))
            area = {"x": left + step * column + GAP / 2, "y": y + GAP / 2, "width": step - GAP, "height": height - GAP}
            hint = box.title or box.text
            parts.append(element("rect", {"class": f"cell-{box.tone}", **area, "rx": "4"}, title=hint))
            room = int((step - GAP - 4) / text_width("x", 12))
            shown = shortened(box.text, max(1, min(MAX_CELL, room)))
            parts.append(text(left + step * (column + 0.5), y + height / 2 + 4, shown, "label", anchor="middle"))
    for column, label in enumerate(columns):
        parts.append(text(left + step * (column + 0.5), base + 18, label, "tick", anchor="middle"))
    parts.append(text((left + WIDTH) / 2, base + 40, x_label, "axis", anchor="middle"))
    if y_label:
        parts.append(text(14, (base + TOP) / 2, y_label, "axis", anchor="middle", turn=-90))
    return svg(parts, width=WIDTH, height=base + BOTTOM, title=title)
