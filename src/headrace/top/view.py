"""A reading as panels for rich, or as plain lines. Both show the same rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import localtime, strftime
from typing import TYPE_CHECKING

from headrace.top.figures import ENGINES, Figures, GpuFigures, Percentiles
from headrace.top.lines import UNKNOWN, bar, clean, duration, gibibytes, number, percent, sparkline
from headrace.top.watch import Reading

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.panel import Panel
    from rich.table import Table

NOT_EXPORTED = "not exported"
WIDE = 110  # columns from which panels stand side by side
MAX_NAME_LEN = 40
MAX_ENGINES = 8
LABEL_WIDTH, VALUE_WIDTH, NOTE_WIDTH = 11, 25, 12
FULL, HIGH = 0.95, 0.85  # of a KV cache

History = Sequence[Figures | None]
Get = Callable[[Figures], float | None]


@dataclass(frozen=True, slots=True)
class Row:
    label: str
    value: str
    history: Get | None = None  # for the sparkline
    share: float | None = None  # for a bar
    top: float | None = None  # of the sparkline; None: its highest value
    style: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    rows: tuple[Row, ...]


def sections(figures: Figures) -> list[Section]:
    return [
        Section("throughput", _throughput(figures)),
        Section("latency of this interval", _latency(figures)),
        Section("load", _load(figures)),
        Section("GPU", _gpus(figures)),
        *([Section("models and engines", _engines(figures))] if figures.engines else []),
    ]


def _throughput(f: Figures) -> tuple[Row, ...]:
    def rate(label: str, name: str, value: float | None, unit: str, get: Get, style: str = "") -> Row:
        shown = NOT_EXPORTED if name in f.missing else number(value, unit)
        return Row(label, shown, get, style=style if value else "")

    return (
        rate("generated", "generated tokens", f.generated_per_s, "tokens/s", lambda o: o.generated_per_s),
        rate("prompt", "prompt tokens", f.prompt_per_s, "tokens/s", lambda o: o.prompt_per_s),
        rate("finished", "requests", f.requests_per_s, "requests/s", lambda o: o.requests_per_s),
        rate("refused", "refused", f.refused_per_s, "requests/s", lambda o: o.refused_per_s, "yellow"),
        rate("errors", "errors", f.errors_per_s, "requests/s", lambda o: o.errors_per_s, "red"),
    )


def _latency(f: Figures) -> tuple[Row, ...]:
    def both(label: str, value: Percentiles | None, get: Callable[[Figures], Percentiles | None]) -> Row:
        if label in f.missing:
            return Row(label, NOT_EXPORTED)
        shown = UNKNOWN if value is None else f"p50 {duration(value.p50)}, p95 {duration(value.p95)}"
        return Row(label, shown, lambda o: _p95(get(o)))

    step, host = f.step_s, f.host_share
    return (
        both("TTFT", f.ttft, lambda o: o.ttft),
        both("ITL", f.itl, lambda o: o.itl),
        Row("step", NOT_EXPORTED if "step time" in f.missing else duration(step), lambda o: o.step_s),
        Row(
            "host share", NOT_EXPORTED if "host share" in f.missing else percent(host), lambda o: o.host_share, top=1.0
        ),
    )


def _p95(value: Percentiles | None) -> float | None:
    return None if value is None else value.p95


def _load(f: Figures) -> tuple[Row, ...]:
    def of(name: str, shown: str) -> str:
        return NOT_EXPORTED if name in f.missing else shown

    kv_style = "red" if (f.kv_use or 0) >= FULL else "yellow" if (f.kv_use or 0) >= HIGH else "green"
    return (
        Row("running", of("running", number(f.running)), lambda o: o.running),
        Row("waiting", of("waiting", number(f.waiting)), lambda o: o.waiting, style="yellow" if f.waiting else ""),
        Row("KV cache", of("KV cache", percent(f.kv_use)), share=f.kv_use, style=kv_style),
        Row(
            "preemptions",
            of("preemptions", number(f.preemptions_per_s, "/s")),
            lambda o: o.preemptions_per_s,
            style="yellow" if f.preemptions_per_s else "",
        ),
        Row("prefix hits", of("prefix hits", percent(f.prefix_hit_share)), lambda o: o.prefix_hit_share, top=1.0),
    )


def _gpus(f: Figures) -> tuple[Row, ...]:
    if "GPU" in f.missing:
        return (Row("GPU", NOT_EXPORTED),)
    if not f.gpus:
        return (Row("GPU", f"none: {clean(f.gpu_missing)}" if f.gpu_missing else UNKNOWN),)
    return tuple(row for gpu in f.gpus for row in _gpu(gpu))


def _gpu(gpu: GpuFigures) -> tuple[Row, ...]:
    clock = None if gpu.sm_clock_hertz is None else gpu.sm_clock_hertz / 1e6
    known = [
        None if gpu.power_watts is None else f"{gpu.power_watts:,.0f} W",
        None if gpu.temperature_celsius is None else f"{gpu.temperature_celsius:.0f} °C",
        None if clock is None else f"{clock:,.0f} MHz",
    ]
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    name = clean(gpu.gpu, 4)
    return (
        Row(f"GPU {name}", percent(gpu.utilization), share=gpu.utilization, style="green"),
        Row("memory", gibibytes(used, total), share=used / total if used is not None and total else None, style="cyan"),
        Row("", ", ".join(filter(None, known)) or UNKNOWN),
    )


def _engines(f: Figures) -> tuple[Row, ...]:
    rows = [
        Row(
            f"{clean(each.model, 24) or UNKNOWN} · {clean(each.engine, 6) or UNKNOWN}",
            f"{number(each.generated_per_s, 'tokens/s')}, running {number(each.running)}, "
            f"waiting {number(each.waiting)}, KV {percent(each.kv_use)}",
        )
        for each in f.engines[:MAX_ENGINES]
    ]
    if len(f.engines) > MAX_ENGINES:
        rows.append(Row("", f"and {len(f.engines) - MAX_ENGINES} more"))
    return tuple(rows)


# ---- the lines around the panels


def title(reading: Reading) -> str:
    figures = reading.figures
    if figures is None:
        return f"{clean(reading.address)} · not readable"
    models = ", ".join(clean(model, MAX_NAME_LEN) for model in figures.models[:3])
    more = f" and {len(figures.models) - 3} more" if len(figures.models) > 3 else ""
    version = f" {clean(figures.version, 20)}" if figures.version else ""
    parts = [clean(reading.address), f"{ENGINES[figures.engine]}{version}", f"{models}{more}", engine_state(figures)]
    return " · ".join(part for part in parts if part)


def engine_state(figures: Figures) -> str:
    """Whether the engine is up. A server without that series answers, which says no more than that."""
    state = {True: "up", False: "ENGINE DOWN", None: "answers"}[figures.is_up]
    if figures.engines_down:
        state = f"ENGINE {', '.join(clean(name, 20) for name in figures.engines_down)} DOWN"
    if figures.restarts:
        state += f", restarts {figures.restarts:,.0f}"
    return f"{state}, RESTARTED" if figures.has_restarted else state


def notes(reading: Reading) -> list[tuple[str, str, str]]:
    """Label, text and style of the lines below the panels."""
    if reading.failure is not None:
        since = f" (for {duration(reading.down_s)})" if reading.down_s else ""
        return [("not readable", f"{clean(reading.failure)}{since}", "red")]
    figures = reading.figures
    assert figures is not None
    lines = []
    if reading.bottleneck:
        lines.append(("bottleneck", clean(reading.bottleneck), "bold"))
    for alert in reading.alerts or ():
        lines.append(("alert", clean(alert), "red"))
    if reading.alerts == ():
        lines.append(("alerts", "none firing", "dim"))
    if figures.missing:
        lines.append(("missing", f"{', '.join(figures.missing)}: no such series on this page", "dim"))
    return lines


# ---- plain


def plain_text(reading: Reading) -> str:
    lines = [title(reading)]
    if reading.figures is not None:
        for section in sections(reading.figures):
            lines += [section.title, *(f"  {row.label:<{LABEL_WIDTH}} {row.value}" for row in section.rows)]
    lines += [f"{label}: {text}" for label, text, _ in notes(reading)]
    return "".join(f"{line.rstrip()}\n" for line in lines)


# ---- rich


def rich_view(reading: Reading, history: History, *, width: int, height: int, interval_s: float) -> Group:
    """For a terminal of this size. What limits the server comes first; where the panels do not fit below it, their
    frames are left out."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = Table.grid(expand=True, padding=(0, 1))
    head.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    head.add_column(justify="right", no_wrap=True)
    figures = reading.figures
    is_bad = figures is None or figures.is_up is False or bool(figures.engines_down)
    clock = strftime("%H:%M:%S", localtime(reading.at))
    head.add_row(Text(title(reading), "bold red" if is_bad else "bold"), Text(f"{interval_s:g} s · {clock}", "dim"))
    parts: list[RenderableType] = [head]
    num_lines = 1
    for label, text, style in notes(reading):
        line = Table.grid(padding=(0, 1))
        line.add_column(width=NOTE_WIDTH, style="dim", no_wrap=True)
        line.add_column()
        line.add_row(label, Text(text, style))
        parts.append(line)
        num_lines += 1 + len(text) // max(1, width - NOTE_WIDTH - 1)
    if reading.figures is not None:
        parts += _panels(sections(reading.figures), history, width, max_lines=height - num_lines)
    elif (last := _last_known(history)) is not None:
        # What it did before it went away, so that the cause is not wiped off the screen.
        parts.append(_panel(sections(last)[0], history, width, is_old=True))
    return Group(*parts)


def _last_known(history: History) -> Figures | None:
    return next((figures for figures in reversed(history) if figures is not None), None)


def _panels(shown: list[Section], history: History, width: int, *, max_lines: int) -> list[RenderableType]:
    from rich.table import Table

    if width < WIDE:
        if sum(len(section.rows) + 2 for section in shown) > max_lines:
            return [_rows(section, history, _picture_width(width)) for section in shown]
        return [_panel(section, history, width) for section in shown]
    rows: list[RenderableType] = []
    for start in range(0, len(shown), 2):
        pair = shown[start : start + 2]
        if len(pair) == 1:
            rows.append(_panel(pair[0], history, width))
            continue
        grid = Table.grid(expand=True)
        height = max(len(section.rows) for section in pair) + 2
        for _ in pair:
            grid.add_column(ratio=1)
        grid.add_row(*(_panel(section, history, width // 2, height=height) for section in pair))
        rows.append(grid)
    return rows


def _panel(section: Section, history: History, width: int, *, height: int | None = None, is_old: bool = False) -> Panel:
    from rich.panel import Panel

    name = f"{section.title}, before" if is_old else section.title
    table = _rows(section, history, _picture_width(width))
    return Panel(table, title=name, title_align="left", border_style="dim", height=height, padding=(0, 1))


def _picture_width(width: int) -> int:
    return max(0, width - LABEL_WIDTH - VALUE_WIDTH - 6)


def _rows(section: Section, history: History, width: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    has_picture = any(row.history is not None or row.share is not None for row in section.rows)
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", no_wrap=True, min_width=LABEL_WIDTH)
    table.add_column(no_wrap=has_picture, overflow="ellipsis", min_width=VALUE_WIDTH if has_picture else None)
    table.add_column(no_wrap=True)
    for row in section.rows:
        is_known = row.value not in (NOT_EXPORTED, UNKNOWN)
        style = ("" if row.share is not None else row.style) if is_known else "dim"
        table.add_row(row.label, Text(row.value, style), Text(_picture(row, history, width), row.style or "blue"))
    return table


def _picture(row: Row, history: History, width: int) -> str:
    if row.value == NOT_EXPORTED:
        return ""
    if row.share is not None:
        return bar(row.share, width)
    if row.history is None:
        return ""
    values = [None if figures is None else row.history(figures) for figures in history]
    return sparkline(values, width, row.top)
