"""Writes a report as one HTML page that needs nothing else: no network, no script, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from headrace.bench.record import RecordError
from headrace.bench.report.document import (
    Chart,
    Code,
    Details,
    Facts,
    Note,
    Part,
    Report,
    Section,
    Table,
    text_of,
    tone_of,
)
from headrace.bench.report.svg import CHART_CSS
from headrace.version import __version__

# A page has no scripts and loads nothing, and the browser enforces it even if a string slipped through unescaped.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
MARKS = {"good": "✓ ", "bad": "✗ ", "unsure": "? ", "plain": ""}

PAGE_CSS = """
:root { color-scheme: light dark; --paper: #f6f7f9; --card: #ffffff; --ink: #1f2937; --quiet: #5b6472; --edge: #dfe3e8;
  --stripe: #f3f5f7; --good: #0f766e; --bad: #b91c1c; --unsure: #92600a; --warn-paper: #fff6e0; --warn-edge: #e8b94a }
@media (prefers-color-scheme: dark) { :root { --paper: #12161d; --card: #1b2029; --ink: #e5e7eb; --quiet: #a3acba;
  --edge: #343c4a; --stripe: #222935; --good: #5eead4; --bad: #fca5a5; --unsure: #fcd34d; --warn-paper: #2e2614;
  --warn-edge: #a87b1d } }
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, 'Segoe UI',
  Roboto, Helvetica, Arial, sans-serif }
main { max-width: 1360px; margin: 0 auto; padding: 28px 24px 60px }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere }
h2 { font-size: 19px; margin: 34px 0 12px }
.subtitle, footer, figcaption, caption { color: var(--quiet) }
.subtitle { margin: 0; overflow-wrap: anywhere }
.headline { font-size: 18px; font-weight: 600; margin: 16px 0 0; overflow-wrap: anywhere }
.warnings { background: var(--warn-paper); border: 1px solid var(--warn-edge); border-radius: 8px; padding: 10px 16px;
  margin: 18px 0 0 }
.warnings strong { display: block }
.warnings ul { margin: 4px 0 0; padding-left: 20px }
.warnings li { overflow-wrap: anywhere }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px; margin: 20px 0 0 }
.tile, figure, .table, .facts, details, .code { background: var(--card); border: 1px solid var(--edge);
  border-radius: 8px }
.tile { padding: 10px 14px }
.tile b { display: block; font-size: 22px; font-weight: 650; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere }
.tile span { color: var(--quiet); font-size: 13.5px }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 540px), 1fr)); gap: 14px;
  margin: 0 0 14px }
.charts > figure:only-child { grid-column: 1 / -1; max-width: 760px }
figure { margin: 0; padding: 12px 14px 10px; min-width: 0 }
figure h3 { font-size: 15px; margin: 0 0 6px }
figure svg { display: block; width: 100%; height: auto; max-width: 720px }
figcaption, caption { font-size: 13.5px }
figcaption { margin-top: 4px }
.table { overflow-x: auto; margin: 0 0 14px }
table { border-collapse: collapse; width: 100%; font-size: 14px }
caption { text-align: left; padding: 9px 12px 7px; caption-side: top }
th, td { padding: 6px 12px; text-align: right; font-variant-numeric: tabular-nums; vertical-align: top }
th { font-weight: 600; border-bottom: 1px solid var(--edge); white-space: nowrap }
td { border-top: 1px solid var(--edge) }
tbody tr:first-child td { border-top: 0 }
tbody tr:nth-child(even) td { background: var(--stripe) }
.text { text-align: left; overflow-wrap: break-word; max-width: 70ch }
td:not(.text) { white-space: nowrap }
.good { color: var(--good); font-weight: 600 }
.bad { color: var(--bad); font-weight: 600 }
.unsure { color: var(--unsure); font-weight: 600 }
.facts { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 4px 20px; padding: 12px 14px;
  margin: 0 0 14px; font-size: 14px }
.facts dt { color: var(--quiet) }
.facts dd { margin: 0; overflow-wrap: anywhere }
.code { margin: 0 0 14px; padding: 10px 14px }
.code span { color: var(--quiet); font-size: 13.5px }
pre { margin: 4px 0 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, SFMono-Regular,
  Menlo, Consolas, monospace; max-height: 420px; overflow-y: auto }
details { margin: 0 0 14px; padding: 8px 14px }
details > summary { cursor: pointer; font-weight: 600; overflow-wrap: anywhere }
details[open] > summary { margin-bottom: 10px }
details .table, details .facts, details .code { border: 0; padding-left: 0; padding-right: 0; margin-bottom: 4px }
p { margin: 0 0 12px; max-width: 90ch; overflow-wrap: anywhere }
footer { margin-top: 40px; font-size: 13px }
@media (max-width: 620px) { main { padding: 20px 14px 40px } figure { overflow-x: auto } figure svg { min-width: 540px }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)) } .tile b { font-size: 19px } }
@media print { body { background: #fff } main { max-width: none } figure, .tile, tr { break-inside: avoid } }
"""


def write_page(report: Report, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(page(report), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise RecordError(f"the report cannot be written to {path}: {error.strerror or error}") from error


def page(report: Report) -> str:
    """The whole page. Only `Chart.svg` is taken as it is: the chart functions escape what they draw."""
    body = "\n".join(
        [
            f"<h1>{_text(report.heading)}</h1>",
            *(f'<p class="subtitle">{_text(line)}</p>' for line in report.under_heading),
            _warnings(report),
            f'<p class="headline">{_text(report.later_headline)}</p>' if report.later_headline else "",
            _tiles(report),
            *map(_section, report.sections),
            f"<footer>Written by headrace {_text(__version__)}.</footer>",
        ]
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_text(report.title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{PAGE_CSS}{CHART_CSS}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _text(content: str) -> str:
    """Escaped, without control characters: a log may hold terminal codes, and HTML forbids most of them."""
    return escape("".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in content))


def _warnings(report: Report) -> str:
    if not report.warnings:
        return ""
    count = "One warning" if len(report.warnings) == 1 else f"{len(report.warnings)} warnings"
    items = "".join(f"<li>{_text(warning)}</li>" for warning in report.warnings)
    return f'<div class="warnings" role="note"><strong>{count}</strong><ul>{items}</ul></div>'


def _tiles(report: Report) -> str:
    if not report.tiles:
        return ""
    tiles = "".join(f'<div class="tile"><span>{_text(n)}</span><b>{_text(v)}</b></div>' for n, v in report.tiles)
    return f'<div class="tiles">{tiles}</div>'


def _section(section: Section) -> str:
    return f"<section>\n<h2>{_text(section.title)}</h2>\n{_parts(section.parts)}\n</section>"


def _parts(parts: Sequence[Part]) -> str:
    """Parts in order; neighbouring charts stand side by side where there is room."""
    written: list[str] = []
    charts: list[str] = []
    for part in (*parts, None):
        if isinstance(part, Chart):
            charts.append(_chart(part))
            continue
        if charts:
            written.append(f'<div class="charts">{"".join(charts)}</div>')
            charts = []
        if part is not None:
            written.append(_part(part))
    return "\n".join(written)


def _part(part: Part) -> str:
    match part:
        case Table():
            return _table(part)
        case Chart():
            return _chart(part)
        case Facts():
            pairs = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in part.pairs)
            return f'<dl class="facts">{pairs}</dl>'
        case Code():
            caption = f"<span>{_text(part.caption)}</span>" if part.caption else ""
            return f'<div class="code">{caption}<pre>{_text(part.text)}</pre></div>'
        case Note():
            return f"<p>{_text(part.text)}</p>"
        case Details():
            return f"<details><summary>{_text(part.title)}</summary>{_parts(part.parts)}</details>"


def _chart(chart: Chart) -> str:
    caption = f"<figcaption>{_text(chart.caption)}</figcaption>" if chart.caption else ""
    return f"<figure><h3>{_text(chart.title)}</h3>{chart.svg}{caption}</figure>"


def _table(table: Table) -> str:
    kinds = ["text" if place < table.num_text_columns else "" for place in range(len(table.columns))]
    caption = f"<caption>{_text(table.caption)}</caption>" if table.caption else ""
    head = "".join(
        f'<th scope="col"{_class(kind)}>{_text(name)}</th>' for name, kind in zip(table.columns, kinds, strict=True)
    )
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td{_class(kind, '' if tone_of(cell) == 'plain' else tone_of(cell))}>"
            f"{MARKS[tone_of(cell)]}{_text(text_of(cell))}</td>"
            for cell, kind in zip(row, kinds, strict=True)
        )
        + "</tr>"
        for row in table.rows
    )
    return f'<div class="table"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _class(*names: str) -> str:
    kept = " ".join(name for name in names if name)
    return f' class="{kept}"' if kept else ""
