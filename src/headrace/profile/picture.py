"""Draws a report as one self-contained HTML page: the mean step as a stacked bar, each part against its ceiling, and a
timeline of a few steps with the device and the engine's thread."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from headrace.profile.parts import TITLES, Part
from headrace.profile.report import Report, Row
from headrace.profile.timeline import Piece

COLOURS: dict[Part, str] = {
    "gemm": "#2f6db5",
    "prefill_attention": "#8e5bb5",
    "decode_attention": "#c2549d",
    "cache": "#2a9d8f",
    "elementwise": "#7fb069",
    "sampling": "#e9a23b",
    "inputs": "#b08968",
    "collectives": "#5e548e",
    "copies": "#4d908e",
    "other": "#8d99ae",
    "unattributed": "#c9ced6",
    "launch_gaps": "#f2d7d5",
    "host_gaps": "#d64545",
    "waiting": "#eceff3",
}
HOST_COLOURS = {"work": "#55606e", "wait": "#dfe4ea"}
WIDTH = 1000
NUM_DRAWN_STEPS = 4
MIN_SHARE_WITH_TEXT = 0.05

_STYLE = """
:root { color-scheme: light }
body { font: 14px/1.45 system-ui, sans-serif; color: #1f2933; margin: 2rem auto; max-width: 1060px; padding: 0 1rem }
h1 { font-size: 1.3rem; margin: 0 0 .3rem } h2 { font-size: 1.05rem; margin: 1.8rem 0 .5rem }
p { margin: .2rem 0 } table { border-collapse: collapse; margin-top: .4rem }
th, td { text-align: right; padding: .2rem .7rem; border-bottom: 1px solid #e3e8ee; font-variant-numeric: tabular-nums }
th:first-child, td:first-child { text-align: left } td.bar { padding: 0 .4rem }
i.dot { display: inline-block; width: .75em; height: .75em; border-radius: 2px; margin-right: .45em }
code, pre { font: 12px/1.5 ui-monospace, monospace } pre { white-space: pre-wrap; background: #f5f7fa; padding: .6rem }
svg { max-width: 100%; height: auto; display: block } svg text { font: 12px system-ui, sans-serif; fill: #1f2933 }
"""


def page(report: Report) -> str:
    """The whole page."""
    record = report.record
    title = "Profile" if record is None else f"{record.model_name or 'Profile'} on {record.device_name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in _summary(report)),
        f"<h2>The mean step: {report.step_ms:.3f} ms</h2>",
        _stacked_bar(report),
        "<h2>Each part against its ceiling</h2>",
        _table(report),
        f"<h2>{NUM_DRAWN_STEPS} steps from the middle of the window</h2>",
        _timeline(report),
        _kernels(report),
        _commands(report),
        *(f"<p>Note: {escape(note)}.</p>" for note in report.notes),
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f"<!doctype html>\n<html lang=en><head>{head}</head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"


def _summary(report: Report) -> Iterator[str]:
    yield from report.table().split("\n\n")[0].splitlines()[0 if report.record is None else 1 :]
    if report.overhead is not None:
        yield f"Overhead: {report.overhead.text()}."


def _stacked_bar(report: Report) -> str:
    shapes, x = [], 0.0
    for row in report.rows:
        width = WIDTH * row.share
        if not width:
            continue
        tip = f"{TITLES[row.part]}: {row.ms_per_step:.3f} ms, {row.share:.1%}"
        shapes.append(_rect(x, 0, width, 46, COLOURS[row.part], tip))
        if row.share >= MIN_SHARE_WITH_TEXT:
            is_light = row.part in ("launch_gaps", "waiting", "unattributed")
            fill = "#1f2933" if is_light else "#ffffff"
            shapes.append(
                f'<text x="{x + width / 2:.1f}" y="28" text-anchor="middle" style="fill:{fill}">{row.share:.0%}</text>'
            )
        x += width
    return _svg(46, shapes, "Stacked bar of the mean step by part")


def _table(report: Report) -> str:
    longest = max((row.ms_per_step for row in report.rows), default=1.0) or 1.0
    lines = [
        (
            "<table><tr><th>part</th><th>ms per step</th><th>share</th><th>ceiling, ms</th><th>of ceiling</th>"
            "<th>rate</th><th></th></tr>"
        )
    ]
    for row in report.rows:
        cells = [
            f'<i class="dot" style="background:{COLOURS[row.part]}"></i>{escape(TITLES[row.part])}',
            f"{row.ms_per_step:.3f}",
            f"{row.share:.1%}",
            "" if row.ceiling_ms is None else f"{row.ceiling_ms:.3f}",
            "" if row.of_ceiling is None else f"{row.of_ceiling:.0%}",
            _rate(row),
        ]
        bar = _part_bar(row, longest)
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + f'<td class="bar">{bar}</td></tr>')
    lines.append("</table><p>The mark in a bar is the ceiling: the least time that the part's work needs here.</p>")
    return "\n".join(lines)


def _part_bar(row: Row, longest: float) -> str:
    width = 240 * row.ms_per_step / longest
    shapes = [_rect(0, 3, max(width, 0.5), 10, COLOURS[row.part], "")]
    if row.ceiling_ms is not None:
        at = min(240 * row.ceiling_ms / longest, 239.0)
        shapes.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="16" stroke="#1f2933" stroke-width="2"/>')
    return f'<svg width="240" height="16" viewBox="0 0 240 16" role="img">{"".join(shapes)}</svg>'


def _rate(row: Row) -> str:
    if row.ceiling_ms is None:
        return ""
    if row.limit == "GEMM rate" and row.tflop_s is not None:
        return f"{row.tflop_s:,.2f} TFLOP/s"
    return "" if row.gb_s is None else f"{row.gb_s:,.1f} GB/s"


def _timeline(report: Report) -> str:
    pieces = report.timeline.pieces
    if not pieces:
        return "<p>The trace has no step.</p>"
    span = min(NUM_DRAWN_STEPS * 1e3 * report.step_ms, report.timeline.span_us)
    start = pieces[0].start + (report.timeline.span_us - span) / 2
    end, scale = start + span, WIDTH / span
    shapes = ['<text x="0" y="12">device</text>']
    for piece in _columns(pieces, start, end):
        x, width = (piece.start - start) * scale, piece.us * scale
        shapes.append(_rect(x, 18, width, 40, COLOURS[piece.part], f"{TITLES[piece.part]}: {piece.us / 1e3:.3f} ms"))
    height = 66
    if report.record is not None and report.record.steps:
        shapes.append('<text x="0" y="78">engine\'s thread: work (dark), waiting for the device (light)</text>')
        shapes += _host_shapes(report, start, end, scale)
        height = 112
    shapes += _axis(span, height, scale)
    return _svg(height + 24, shapes, "Timeline of the device and the engine's thread")


def _host_shapes(report: Report, start: float, end: float, scale: float) -> Iterator[str]:
    assert report.record is not None
    offset = report.timeline.base_ns / 1e3
    for step in report.record.steps:
        times = [at * 1e6 - offset for at in (step.started_at, step.planned_at, step.collected_at, step.ended_at)]
        for first, last, kind in zip(times, times[1:], ("work", "wait", "work"), strict=False):
            x, width = (max(first, start) - start) * scale, (min(last, end) - max(first, start)) * scale
            if width > 0:
                tip = f"step {step.step}, {kind}: {(last - first) / 1e3:.3f} ms"
                yield _rect(x, 84, width, 22, HOST_COLOURS[kind], tip)


def _columns(pieces: list[Piece], start: float, end: float) -> Iterator[Piece]:
    """The window in columns of one pixel, each of the part that has most of it; neighbours of one part are joined."""
    column_us = (end - start) / WIDTH
    totals: list[dict[Part, float]] = [{} for _ in range(WIDTH)]
    for piece in pieces:
        first, last = max(piece.start, start), min(piece.end, end)
        while first < last:
            index = min(int((first - start) / column_us), WIDTH - 1)
            until = last if index == WIDTH - 1 else min(last, start + (index + 1) * column_us)
            if until <= first:  # rounding: the next column
                first = math.nextafter(first, math.inf)
                continue
            totals[index][piece.part] = totals[index].get(piece.part, 0.0) + until - first
            first = until
    begun = 0
    parts: list[Part] = [max(total, key=total.__getitem__) if total else "waiting" for total in totals]
    for index in range(1, WIDTH + 1):
        if index == WIDTH or parts[index] != parts[begun]:
            yield Piece(start + begun * column_us, start + index * column_us, parts[begun], "")
            begun = index


def _axis(span_us: float, y: float, scale: float) -> Iterator[str]:
    tick = 10.0 ** len(str(int(span_us / 10))) / 10
    while span_us / tick > 12:
        tick *= 2 if span_us / tick < 30 else 5
    while span_us / tick < 5:
        tick /= 2
    for index in range(int(span_us / tick) + 1):
        x = index * tick * scale
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 5}" stroke="#8d99ae"/>'
        anchor = "start" if index == 0 else "end" if x > WIDTH - 30 else "middle"
        yield f'<text x="{x:.1f}" y="{y + 18}" text-anchor="{anchor}">{index * tick / 1e3:g} ms</text>'


def _kernels(report: Report) -> str:
    if not report.kernels:
        return ""
    lines = ["<h2>Longest kernels and operations</h2><table><tr><th>name</th><th>share</th><th>part</th></tr>"]
    for kernel in report.kernels:
        name = escape(kernel.name.split("(")[0][:90])
        lines.append(
            f"<tr><td><code>{name}</code></td><td>{kernel.share:.1%}</td><td>{escape(TITLES[kernel.part])}</td></tr>"
        )
    return "\n".join([*lines, "</table>"])


def _commands(report: Report) -> str:
    if not report.commands:
        return ""
    shown = "\n\n".join(f"# {name}\n{command}" for name, command in report.commands.items())
    return f"<h2>The same window with NVIDIA's tools</h2><pre>{escape(shown)}</pre>"


def _svg(height: float, shapes: list[str], label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(shapes)}</svg>'


def _rect(x: float, y: float, width: float, height: float, colour: str, tip: str) -> str:
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" fill="{colour}">{title}</rect>'
