"""A sweep as a report: the ranking, the launch command of the best, and why others failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.bench.compare import FIGURES
from headrace.bench.report.bars import Bar, bar_chart
from headrace.bench.report.document import Cell, Chart, Code, Details, Note, Part, Report, Section, Table, grouped
from headrace.bench.report.run_facts import run_section, subtitle_of, title_of
from headrace.bench.report.scales import Axis
from headrace.bench.report.svg import shortened
from headrace.bench.report.xy import Point, Series, pareto, xy_chart
from headrace.bench.sweep.settings_file import settings_file
from headrace.bench.values import NOT_AVAILABLE, found, interval, is_number, number, percent, plain, ratio, seconds

LABELS = {figure.name: figure for figure in FIGURES}
SHOWN_FIGURES = (
    "output_tokens_per_s",
    "requests_per_s",
    "goodput_requests_per_s",
    "ttft_p50",
    "ttft_p95",
    "tpot_p50",
    "e2e_p95",
)
Row = Mapping[str, Any]


def sweep_report(record: Mapping[str, Any]) -> Report:
    """The report of a sweep's record (`SweepResult.as_record`)."""
    rows: list[Row] = list(record.get("configs") or [])
    ranked = [row for row in rows if row.get("rank")]
    failed = [row for row in rows if row.get("status") == "failed"]
    sections = [
        _best(record, ranked),
        _ranking(record, rows),
        _trade_off(ranked),
        _failures(failed),
        _settings(rows),
        run_section(record),
    ]
    return Report(
        title_of(record, "Sweep"),
        subtitle_of(record),
        headline=_headline(record, rows, ranked),
        warnings=_warnings(record, rows),
        tiles=_tiles(record, rows, ranked, failed),
        sections=[section for section in sections if section is not None],
    )


def best_settings(record: Mapping[str, Any]) -> tuple[str, str] | None:
    """Suffix and text of a settings file of the best config."""
    best = next((row for row in record.get("configs") or [] if row.get("rank") == 1), None)
    if best is None:
        return None
    settings = {**(record.get("common_settings") or {}), **(best.get("settings") or {})}
    return settings_file(str(found(record, "engine", "name")), settings)


def _figure(record: Mapping[str, Any]) -> tuple[str, str, str]:
    """Name, label and unit of the figure that ranks."""
    name = str(record.get("rank_by"))
    return (name, LABELS[name].label, LABELS[name].unit) if name in LABELS else (name, name, "")


def _headline(record: Mapping[str, Any], rows: Sequence[Row], ranked: Sequence[Row]) -> str:
    if not ranked:
        return f"None of {len(rows)} configs could be ranked."
    _, label, unit = _figure(record)
    best = ranked[0]
    tied = [row for row in ranked[1:] if row.get("is_tied")]
    text = f"Best: {best['name']}, {number(best.get('value'), unit)} ({label})."
    if tied:
        others = f"{len(tied)} other configs are" if len(tied) > 1 else "One other config is"
        text += f" {others} not shown to differ from it."
    elif len(ranked) > 1 and not best.get("interval"):
        text += " One round each: whether the ranking is more than noise is not known."
    return text


def _warnings(record: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    warnings = [f"the sweep ended early: {record['stopped']}"] if record.get("stopped") else []
    warnings += [str(warning) for warning in record.get("warnings") or []]
    labelled = [
        (str(row["name"]), f"the engine does not report {name}; whether it is in force is not known")
        for row in rows
        for name in row.get("not_reported") or []
    ]
    labelled += [(str(row["name"]), str(warning)) for row in rows for warning in row.get("warnings") or []]
    return [*warnings, *grouped(labelled)]


def _tiles(
    record: Mapping[str, Any], rows: Sequence[Row], ranked: Sequence[Row], failed: Sequence[Row]
) -> list[tuple[str, str]]:
    _, label, unit = _figure(record)
    tiles = [(f"{label}, best", number(ranked[0].get("value"), unit))] if ranked else []
    if len(ranked) > 1 and is_number(ranked[-1].get("ratio")):
        tiles.append(("worst of the ranked, of the best", percent(ranked[-1]["ratio"])))
    tiles += [("configs", str(len(rows))), ("failed", str(len(failed)))]
    return [*tiles, ("rounds each", plain(record.get("num_rounds")))]


def _best(record: Mapping[str, Any], ranked: Sequence[Row]) -> Section | None:
    if not ranked:
        return None
    best = ranked[0]
    parts: list[Part] = [Code(best.get("launch_command") or NOT_AVAILABLE, "Launch command")]
    settings = best_settings(record)
    if settings is not None:
        suffix, text = settings
        kind = "TOML" if suffix == ".toml" else "YAML"
        parts.append(Code(text or "# all settings are the engine's own\n", f"Settings file ({kind})"))
    return Section(f"The best: {best['name']}", parts)


def _ranking(record: Mapping[str, Any], rows: Sequence[Row]) -> Section:
    name, label, unit = _figure(record)
    bars = [
        Bar(
            str(row["name"]),
            row.get("value") if row.get("status") == "ok" else None,
            _shown_value(row, unit),
            low,
            high,
            place=0 if row.get("rank") == 1 else 5,
        )
        for row in rows
        for low, high in [row.get("interval") or (None, None)]
    ]
    title = f"{label[0].upper()}{label[1:]} of each config"
    axis = Axis(label + (f" ({unit})" if unit else ""))
    chart = Chart(
        title,
        bar_chart(bars, axis, title=title),
        "With a 95 % interval over rounds, where there are several; a very wide one is cut at the edge.",
    )
    columns = ["config", "rank", label, "95 % interval", "of the best", "difference to the best", "load", "rounds"]
    parts: list[Part] = [chart, Table([*columns, "start-up"], [_ranking_row(row, unit) for row in rows])]
    others = [each for each in SHOWN_FIGURES if each != name and any(_mean(row, each) is not None for row in rows)]
    measured = [row for row in rows if row.get("rounds")]
    if others and measured:
        cells = [
            [str(row["name"]), *(number(_mean(row, each), LABELS[each].unit) for each in others)] for row in measured
        ]
        parts.append(Table(["config", *(LABELS[each].label for each in others)], cells, caption="Means over rounds"))
    return Section("Ranking", parts)


def _ranking_row(row: Row, unit: str) -> list[str | Cell]:
    rounds = row.get("rounds") or []
    reused = f" ({row['num_reused']} reused)" if row.get("num_reused") else ""
    if row.get("status") != "ok":
        status = Cell(_status(row), "bad") if row.get("status") == "failed" else _status(row)
        return [str(row["name"]), "", status, "", "", "", "", f"{len(rounds)}{reused}", ""]
    low, high = row.get("interval") or (None, None)
    return [
        str(row["name"]),
        plain(row["rank"]) if row.get("rank") else "none",
        number(row.get("value"), unit),
        "one round" if len(rounds) == 1 else interval(low, high),
        ratio(row.get("ratio")),
        _difference(row),
        plain(row.get("level") or "offline"),
        f"{len(rounds)}{reused}",
        seconds(row.get("start_s")),
    ]


def _difference(row: Row) -> str | Cell:
    if row.get("rank") == 1:
        return Cell("the best", "good")
    if not row.get("rank"):
        return ""
    if row.get("ratio_interval") is None:
        return Cell("no interval: one round", "unsure")
    low, high = row["ratio_interval"]
    shown = f"{ratio(low)} to {ratio(high)}"
    return Cell(f"no difference shown ({shown})", "unsure") if row.get("is_tied") else f"shown ({shown})"


def _status(row: Row) -> str:
    if row.get("status") == "failed":
        return f"failed: {found(row, 'failure', 'kind')}"
    return "not run" if row.get("status") == "not run" else NOT_AVAILABLE


def _shown_value(row: Row, unit: str) -> str:
    return number(row.get("value"), unit) if row.get("status") == "ok" and is_number(row.get("value")) else _status(row)


def _mean(row: Row, name: str) -> float | None:
    values = [float(each[name]) for each in row.get("rounds") or [] if is_number(each.get(name))]
    return sum(values) / len(values) if values else None


def _trade_off(ranked: Sequence[Row]) -> Section | None:
    """Throughput against latency, if both were measured. The frontier is what no other config beats in both."""
    charts = []
    for name in ("ttft_p95", "tpot_p50"):
        rows = [(row, _mean(row, "output_tokens_per_s"), _mean(row, name)) for row in ranked]
        places = [(row, x, y) for row, x, y in rows if x is not None and y is not None]
        if len(places) < 2:
            continue
        frontier = pareto([(x, y) for _, x, y in places], y_is_cost=True)
        points = [
            Point(
                x,
                y,
                label=shortened(str(row["name"]), 24),
                title=f"{row['name']}: {number(x)} tokens/s, {number(y)} ms",
            )
            for row, x, y in places
        ]
        line = Series("frontier", [Point(*places[place][1:]) for place in frontier], is_dashed=True, place=0)
        title = f"{LABELS[name].label} against throughput"
        x_axis, y_axis = Axis("output tokens/s", starts_at_zero=False), Axis(f"{LABELS[name].label} (ms)")
        chart = xy_chart([line, Series("configs", points, "points", place=2)], x=x_axis, y=y_axis, title=title)
        charts.append(Chart(title, chart, "Lower right is better."))
    return Section("Throughput against latency", charts) if charts else None


def _failures(failed: Sequence[Row]) -> Section | None:
    if not failed:
        return None
    rows = [
        [
            str(row["name"]),
            *(plain(found(row, "failure", key) or NOT_AVAILABLE) for key in ("stage", "kind", "message")),
        ]
        for row in failed
    ]
    parts: list[Part] = [Table(["config", "failed at", "class", "message"], rows, num_text_columns=4)]
    for row in failed:
        if tail := found(row, "failure", "log_tail"):
            parts.append(Details(f"End of the log: {row['name']}", [Code(str(tail))]))
    return Section("Failed configs", parts)


def _settings(rows: Sequence[Row]) -> Section:
    names = list(dict.fromkeys(name for row in rows for name in row.get("settings") or {}))
    if not names:
        return Section("Settings", [Note("All configs leave every setting to the engine.")])
    cells = [
        [
            str(row["name"]),
            *(plain(row["settings"][name]) if name in (row.get("settings") or {}) else "" for name in names),
        ]
        for row in rows
    ]
    return Section(
        "Settings", [Table(["config", *names], cells, caption="As given; an empty cell is the engine's own choice")]
    )
