"""SVG elements as text, and the style that all charts share. Charts are drawn by xy.py, bars.py, grid.py and
panels.py.

A chart is an `<svg class="chart">`. In a page, the page's style sheet holds CHART_CSS once; as a file of its own,
`standalone` puts it into the SVG. Colours follow the reader's colour scheme. Everything that comes from a record is
escaped here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from itertools import pairwise

# Each has a contrast of at least 3 to the background of both colour schemes. Neighbours also differ in lightness.
COLOURS = ("#0d9488", "#d97706", "#3b82f6", "#db2777", "#8b5cf6", "#7c8aa0")
WIDE = frozenset("mwMW@%")  # half as wide again
CAP = 3.5  # half of the end of a whisker
SIZE = 4.0  # half of a marker
CHAR_WIDTH = 0.58  # of the font size: mean width of a character of the fonts below

CHART_CSS = """
.chart text { font-family: system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif; fill: #1f2937 }
.chart .card { fill: #ffffff; stroke: #d1d5db }
.chart .title { font-size: 20px; font-weight: 600 }
.chart .quiet { font-size: 13px; fill: #5b6472 }
.chart .panel { font-size: 15px; font-weight: 600 }
.chart .label { font-size: 13px }
.chart .value { font-size: 10.5px }
.chart .own { font-weight: 700 }
.chart .tick { font-size: 12px; fill: #5b6472 }
.chart .axis { font-size: 12.5px; fill: #374151 }
.chart .name { font-size: 12.5px; paint-order: stroke; stroke: #ffffff; stroke-width: 3px }
.chart .point { font-size: 11.5px; paint-order: stroke; stroke: #ffffff; stroke-width: 3px }
.chart .grid { stroke: #e5e7eb }
.chart .base { stroke: #9ca3af }
.chart .span { fill: #6b7280; fill-opacity: 0.13 }
.chart .limit { stroke: #dc2626; stroke-dasharray: 5 4; stroke-width: 1.5 }
.chart .limit-label { font-size: 12px; fill: #b91c1c }
.chart .whisker { stroke: #1f2937; stroke-width: 1.5; fill: none }
.chart .mark { stroke: #ffffff; stroke-width: 1.5 }
.chart .quiet-line { stroke: #9ca3af; stroke-width: 1.2; fill: none }
.chart .quiet-mark { fill: #9ca3af }
.chart .cell-good { fill: #d5f0ea; stroke: #0f766e }
.chart .cell-bad { fill: #fbdcdc; stroke: #b91c1c }
.chart .cell-unsure { fill: #fdf0cf; stroke: #b7791f }
.chart .cell-plain { fill: none; stroke: #d1d5db; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
  .chart text { fill: #e5e7eb }
  .chart .card { fill: #1b2029; stroke: #3b4352 }
  .chart .quiet, .chart .tick { fill: #a3acba }
  .chart .axis { fill: #c3cad5 }
  .chart .point, .chart .name { stroke: #1b2029 }
  .chart .grid { stroke: #333a47 }
  .chart .base { stroke: #6b7280 }
  .chart .span { fill: #9ca3af; fill-opacity: 0.16 }
  .chart .limit { stroke: #f87171 }
  .chart .limit-label { fill: #fca5a5 }
  .chart .whisker { stroke: #e5e7eb }
  .chart .mark { stroke: #1b2029 }
  .chart .quiet-line { stroke: #6b7280 }
  .chart .quiet-mark { fill: #7c8594 }
  .chart .cell-good { fill: #12403b; stroke: #5eead4 }
  .chart .cell-bad { fill: #4c1d1d; stroke: #fca5a5 }
  .chart .cell-unsure { fill: #443411; stroke: #fcd34d }
  .chart .cell-plain { stroke: #4b5563 }
}
"""


def colour(place: int) -> str:
    """The colour of the series at this place. There are only six: charts of more series repeat them."""
    return COLOURS[place % len(COLOURS)]


def svg(parts: Iterable[str], *, width: float, height: float, title: str) -> str:
    """A chart. Screen readers say the title; it is not drawn."""
    body = "\n".join(parts)
    return (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" aria-label="{escape(title)}">\n{body}\n</svg>\n'
    )


def standalone(chart: str) -> str:
    """The same chart as a file of its own, with its style."""
    start = chart.index(">") + 1
    return f"{chart[:start]}\n<style>{CHART_CSS}</style>{chart[start:]}"


def element(name: str, attributes: Mapping[str, object], *, title: str = "") -> str:
    """One element; numbers with one decimal. `title` is shown when the pointer rests on it."""
    shown = " ".join(
        f'{key}="{f"{value:.1f}" if isinstance(value, float) else escape(str(value))}"'
        for key, value in attributes.items()
    )
    return f"<{name} {shown}><title>{escape(title)}</title></{name}>" if title else f"<{name} {shown}/>"


def text(x: float, y: float, content: str, kind: str, *, anchor: str = "start", turn: float | None = None) -> str:
    rotation = "" if turn is None else f' transform="rotate({turn:g} {x:.1f} {y:.1f})"'
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{rotation}>{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def whisker(x: float, low: float, high: float, *, is_horizontal: bool = False) -> str:
    """An interval with caps, around one place."""
    if is_horizontal:
        ends = [f"M{end:.1f} {x - CAP:.1f}v{2 * CAP:.1f}" for end in (low, high)]
        path = f"{ends[0]}M{low:.1f} {x:.1f}H{high:.1f}{ends[1]}"
    else:
        ends = [f"M{x - CAP:.1f} {end:.1f}h{2 * CAP:.1f}" for end in (low, high)]
        path = f"{ends[0]}M{x:.1f} {low:.1f}V{high:.1f}{ends[1]}"
    return f'<path class="whisker" d="{path}"/>'


def marker(x: float, y: float, place: int, *, title: str = "") -> str:
    """A point of a series. Series differ in shape as well as in colour."""
    fill = {"class": "mark", "fill": colour(place)}
    shape = place % 4
    if shape == 0:
        return element("circle", {"cx": x, "cy": y, "r": SIZE, **fill}, title=title)
    if shape == 1:
        return element(
            "rect", {"x": x - SIZE, "y": y - SIZE, "width": 2 * SIZE, "height": 2 * SIZE, **fill}, title=title
        )
    wide = SIZE * 1.3
    corners = (
        [(x, y - wide), (x + wide, y + SIZE), (x - wide, y + SIZE)]
        if shape == 2
        else [(x, y - wide), (x + wide, y), (x, y + wide), (x - wide, y)]
    )
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
    return element("polygon", {"points": points, **fill}, title=title)


def text_width(content: str, font_size: float) -> float:
    num_wide = sum(letter in WIDE for letter in content)
    return (len(content) + num_wide / 2) * font_size * CHAR_WIDTH


def shortened(content: str, max_chars: int) -> str:
    return content if len(content) <= max_chars else content[: max_chars - 1].rstrip() + "…"


def spread(places: Iterable[float], gap: float) -> list[float]:
    """The same places, moved apart as little as needed so that neighbours differ by `gap`. Order is kept."""
    given = list(places)
    order = sorted(range(len(given)), key=given.__getitem__)
    moved = list(given)
    for before, place in pairwise(order):
        moved[place] = max(moved[place], moved[before] + gap)
    shift = sum(new - old for new, old in zip(moved, given, strict=True)) / max(1, len(given))
    return [place - shift for place in moved]
