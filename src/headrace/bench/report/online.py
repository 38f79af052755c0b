"""An online record as a report: latency against throughput over load levels, and what went wrong at each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from headrace.bench.levels import (
    LATENCIES,
    UNANSWERED,
    basis_of,
    figures_of,
    levels_of,
    load_amount,
    load_label,
    steady_rows,
)
from headrace.bench.outcomes import Outcome, answered
from headrace.bench.report.bars import Stack, stacked_chart
from headrace.bench.report.document import (
    Cell,
    Chart,
    Details,
    Facts,
    Note,
    Part,
    Report,
    Section,
    Table,
    Tone,
    grouped,
)
from headrace.bench.report.run_facts import facts_table, run_section, subtitle_of, telemetry_of, title_of
from headrace.bench.report.scales import Axis
from headrace.bench.report.xy import Limit, Point, Series, Span, cdf, over_time, xy_chart
from headrace.bench.slo import Slo
from headrace.bench.values import NOT_AVAILABLE, found, is_number, milliseconds, number, percent, plain
from headrace.errors import ConfigError

TONES: dict[str, Tone] = {"met": "good", "missed": "bad", "unresolved": "unsure"}
Level = Mapping[str, Any]
Rows = Sequence[list[Outcome] | None]


def online_report(record: Mapping[str, Any], rows: Rows = ()) -> Report:
    """The report of an online record; with request rows, distributions too."""
    levels = levels_of(record)
    sections = [
        _curve(levels),
        _latency(levels, rows),
        _over_time(levels),
        _unanswered(levels),
        _objectives(levels),
        _resources(levels),
        run_section(record),
    ]
    return Report(
        title_of(record, "Online benchmark"),
        subtitle_of(record),
        headline=_headline(levels),
        warnings=warnings_of(record),
        tiles=_tiles(levels),
        sections=[section for section in sections if section is not None],
    )


def warnings_of(record: Mapping[str, Any]) -> list[str]:
    """Of the record, then of each level, then what the client said of itself. Each once."""
    own = [str(warning) for warning in record.get("warnings") or []]
    of_levels = [
        (load_label(level.get("load")), str(warning))
        for level in record.get("levels") or []
        for warning in [*(level.get("warnings") or []), *(found(level, "client", "flags") or [])]
    ]
    of_client = [str(flag) for flag in found(record, "client", "flags") or []]
    return list(dict.fromkeys([*own, *grouped(of_levels), *of_client]))


def _best(levels: Sequence[Level]) -> Level | None:
    """The level of most output tokens/s."""
    rated = [level for level in levels if is_number(figures_of(level).get("output_tokens_per_s"))]
    return max(rated, key=lambda level: float(figures_of(level)["output_tokens_per_s"]), default=None)


def _headline(levels: Sequence[Level]) -> str:
    best = _best(levels)
    if best is None:
        return "No level has figures."
    figures = figures_of(best)
    most = f"Most output: {number(figures['output_tokens_per_s'])} tokens/s at {load_label(best.get('load'))}."
    objectives = [level for level in levels if found(figures_of(level), "slo", "verdict")]
    if not objectives:
        return most
    met = [level for level in objectives if figures_of(level)["slo"]["verdict"] == "met"]
    highest = max(met, key=lambda level: float(figures_of(level)["slo"]["goodput_requests_per_s"]), default=None)
    if highest is None:
        return f"{most} No level is shown to meet the SLO."
    goodput = number(float(figures_of(highest)["slo"]["goodput_requests_per_s"]))
    return f"{most} The SLO is met up to {goodput} good requests/s, at {load_label(highest.get('load'))}."


def _tiles(levels: Sequence[Level]) -> list[tuple[str, str]]:
    best = _best(levels)
    if best is None:
        return []
    figures = figures_of(best)
    return [
        ("output tokens/s", number(figures.get("output_tokens_per_s"))),
        ("requests/s answered", number(figures.get("requests_per_s"))),
        ("time to first token, p50", milliseconds(found(figures, "ttft_ms", "p50"))),
        ("time per output token, p50", milliseconds(found(figures, "tpot_ms", "p50"))),
        ("at load", load_label(best.get("load"))),
    ]


def _curve(levels: Sequence[Level]) -> Section:
    parts: list[Part] = []
    if len(levels) > 1:
        parts += [_latency_over_throughput(levels, name) for name in ("ttft_ms", "tpot_ms", "e2e_ms")]
        parts.append(_throughput_over_load(levels))
    rows = [
        [
            load_label(level.get("load")),
            *(number(figures_of(level).get(f"{name}_per_s")) for name in ("output_tokens", "total_tokens", "requests")),
            *(milliseconds(found(figures_of(level), name, "p50")) for name in LATENCIES),
            basis_of(level),
        ]
        for level in levels
    ]
    columns = ["load", "output tokens/s", "total tokens/s", "requests/s", "TTFT p50", "TPOT p50", "ITL p50", "e2e p50"]
    table = Table([*columns, "figures are of"], rows, caption="Answered requests only")
    return Section("Throughput and latency", [*parts, table])


def _latency_over_throughput(levels: Sequence[Level], name: str) -> Chart:
    series = []
    for place, rank in enumerate(("p50", "p95")):
        points = [
            Point(
                float(figures["output_tokens_per_s"]),
                float(figures[name][rank]),
                label=plain(found(level, "load", "concurrency") or load_amount(level.get("load")))
                if place == 0
                else "",
                title=f"{load_label(level.get('load'))}: {number(figures['output_tokens_per_s'])} tokens/s, "
                f"{rank} {milliseconds(figures[name][rank])}",
            )
            for level in levels
            if is_number(found(figures := figures_of(level), name, rank))
            and is_number(figures.get("output_tokens_per_s"))
        ]
        series.append(Series(rank, points, is_labelled_below=True))
    title = f"{LATENCIES[name].capitalize()} against throughput"
    chart = xy_chart(
        series,
        x=Axis("output tokens/s"),
        y=Axis(f"{LATENCIES[name]} (ms, log scale)", is_log=True),
        title=title,
        limits=_limits(levels, name),
    )
    unit = "requests/s sent" if all(found(level, "load", "concurrency") is None for level in levels) else "concurrency"
    return Chart(title, chart, f"One point for each load level, labelled with its {unit}. Lower right is better.")


def _limits(levels: Sequence[Level], name: str) -> list[Limit]:
    """The limits that the SLO sets on this latency."""
    text = next((slo for level in levels if (slo := found(figures_of(level), "slo", "text"))), None)
    try:
        conditions = Slo.parse(str(text)).conditions if text else ()
    except ConfigError:  # a record by another version
        return []
    return [Limit(1e3 * each.limit_s, f"SLO: {each.text}") for each in conditions if f"{each.name}_ms" == name]


def _throughput_over_load(levels: Sequence[Level]) -> Chart:
    is_open = all(found(level, "load", "concurrency") is None for level in levels)
    points = [
        Point(amount, float(rate), title=f"{load_label(level.get('load'))}: {number(rate)} tokens/s")
        for level in levels
        for amount, rate in [(load_amount(level.get("load")), figures_of(level).get("output_tokens_per_s"))]
        if amount is not None and rate is not None and is_number(rate)
    ]
    ticks = () if is_open else tuple(sorted({point.x for point in points}))
    axis = Axis("requests/s sent" if is_open else "concurrency (log scale)", is_log=not is_open, ticks=ticks)
    title = "Throughput over load"
    return Chart(title, xy_chart([Series("output tokens/s", points)], x=axis, y=Axis("output tokens/s"), title=title))


def _latency(levels: Sequence[Level], rows: Rows) -> Section:
    charts: list[Part] = []
    kept = [
        (load_label(level.get("load")), answered(steady_rows(level, outcomes)))
        for level, outcomes in zip_longest(levels, rows[: len(levels)])
        if outcomes
    ]
    for name, label in LATENCIES.items():
        series = [Series(title, points) for title, outcomes in kept if (points := cdf(_values(outcomes, name)))]
        if series:
            title = f"Distribution of {label}"
            x, y = (
                Axis("ms (log scale)", is_log=True),
                Axis("% of requests" if name != "itl_ms" else "% of gaps", high=100),
            )
            charts.append(Chart(title, xy_chart(series, x=x, y=y, title=title)))
    tables = [_percentiles(levels, name) for name in LATENCIES]
    note = [] if charts else [Note("Distributions are not available: this report has no request rows.")]
    return Section("Latency", [*charts, *note, *tables])


def _values(outcomes: Sequence[Outcome], name: str) -> list[float]:
    if name == "itl_ms":
        return [1e3 * gap for outcome in outcomes for gap in outcome.itl_s]
    key = f"{name.removesuffix('_ms')}_s"
    return [1e3 * value for outcome in outcomes if (value := getattr(outcome, key)) is not None]


def _percentiles(levels: Sequence[Level], name: str) -> Table:
    keys = ("mean", "p50", "p90", "p95", "p99", "max")
    rows = []
    for level in levels:
        values = figures_of(level).get(name)
        count = found(values, "count")
        rows.append([load_label(level.get("load")), number(count), *(milliseconds(found(values, key)) for key in keys)])
    return Table(["load", "count", *keys], rows, caption=LATENCIES[name].capitalize())


def _over_time(levels: Sequence[Level]) -> Section | None:
    charts = []
    for level in levels:
        series = [row for row in level.get("series") or [] if len(row) >= 2 and is_number(row[0]) and is_number(row[1])]
        if not series:
            continue
        steady, label = level.get("steady"), load_label(level.get("load"))
        spans = []
        if is_number(found(steady, "start_s")) and is_number(found(steady, "end_s")):
            spans = [Span(float(found(steady, "start_s")), float(found(steady, "end_s")), "steady window")]
        title = f"Output over time, {label}"
        chart = xy_chart(
            [Series("output tokens/s", over_time([(row[0], row[1]) for row in series]))],
            x=Axis("seconds since the start"),
            y=Axis("output tokens/s"),
            title=title,
            spans=spans,
            height=250,
        )
        caption = "" if spans else f"No steady window: {found(steady, 'reason') or 'none was looked for'}."
        charts.append(Chart(title, chart, caption))
    return Section("Throughput over time", [*charts, *_running(levels)]) if charts else None


def _running(levels: Sequence[Level]) -> list[Chart]:
    """Requests in flight over time, all levels in one chart: an open loop that the server cannot follow grows."""
    series = [
        Series(load_label(level.get("load")), over_time(rows))
        for level in levels
        if (rows := [(row[0], row[2]) for row in level.get("series") or [] if len(row) >= 3 and is_number(row[2])])
    ]
    title = "Requests running over time"
    axes = Axis("seconds since the start"), Axis("requests running")
    return [Chart(title, xy_chart(series, x=axes[0], y=axes[1], title=title, height=250))] if series else []


def _unanswered(levels: Sequence[Level]) -> Section:
    """Refused, failed and timed-out requests, of the whole run: also outside of the steady window."""
    summaries = [level.get("summary") or {} for level in levels]
    labels = [load_label(level.get("load")) for level in levels]
    names = ["num_ok", *UNANSWERED]
    columns = ["load", "requests", "answered", *UNANSWERED.values(), "share answered"]
    rows: list[list[str | Cell]] = []
    for label, summary in zip(labels, summaries, strict=True):
        total = summary.get("num_requests")
        share = summary.get("num_ok", 0) / total if is_number(total) and total else None
        cells = [
            Cell(number(summary.get(name)), "bad" if summary.get(name) else "plain")
            if name != "num_ok"
            else number(summary.get(name))
            for name in names
        ]
        rows.append([label, number(total), *cells, percent(share, 2)])
    parts: list[Part] = []
    lost = any(summary.get(name) for summary in summaries for name in UNANSWERED)
    if lost:
        title = "Requests by outcome"
        stacks = [
            Stack(label, [float(summary.get(name) or 0) for name in names])
            for label, summary in zip(labels, summaries, strict=True)
        ]
        chart = stacked_chart(
            stacks, ["answered", *UNANSWERED.values()], Axis("requests"), title=title, places=(0, 1, 3, 4)
        )
        parts.append(Chart(title, chart, "Rates and latencies count answered requests only."))
    parts.append(Table(columns, rows))
    errors = [
        (label, error, count)
        for label, s in zip(labels, summaries, strict=True)
        for error, count in (s.get("errors") or {}).items()
    ]
    if errors:
        table = Table(["load", "error", "requests"], [[a, b, number(c)] for a, b, c in errors], num_text_columns=2)
        parts.append(Details("Most frequent errors", [table]))
    return Section("Answered, refused and failed requests", parts)


def _objectives(levels: Sequence[Level]) -> Section | None:
    judged: list[tuple[Level, Any]] = [(level, slo) for level in levels if (slo := figures_of(level).get("slo"))]
    if not judged:
        return None
    rows: list[list[str | Cell]] = []
    for level, slo in judged:
        label = load_label(level.get("load"))
        goodput = (
            number(float(slo["goodput_requests_per_s"]))
            if is_number(slo.get("goodput_requests_per_s"))
            else NOT_AVAILABLE
        )
        rows.append([label, "all", Cell(slo["verdict"], TONES.get(slo["verdict"], "plain")), "", "", goodput])
        for condition in slo.get("conditions") or []:
            low, high = condition.get("interval") or (None, None)
            verdict = Cell(condition["verdict"], TONES.get(condition["verdict"], "plain"))
            shares = [percent(condition.get("share"), 2), f"{percent(low, 2)} to {percent(high, 2)}"]
            rows.append([label, condition["condition"], verdict, *shares, ""])
    columns = ["load", "condition", "verdict", "share of requests", "95 % interval", "goodput, requests/s"]
    note = (
        "A condition is met or missed only if the 95 % interval of its share says so. Otherwise it needs more requests."
    )
    return Section(
        f"Objectives: {judged[0][1].get('text', '')}", [Table(columns, rows, num_text_columns=3), Note(note)]
    )


def _resources(levels: Sequence[Level]) -> Section:
    labels = [load_label(level.get("load")) for level in levels]
    parts: list[Part] = []
    for key, title in (
        ("counters", "Counters of the engine"),
        ("telemetry", "Telemetry"),
        ("client", "The client's own cost"),
    ):
        facts = [telemetry_of(_without_flags(level.get(key))) for level in levels]
        table = facts_table(title, labels, facts)
        parts.append(table if table is not None else Facts([(title, NOT_AVAILABLE)]))
    return Section("Engine, hardware and client", parts)


def _without_flags(facts: Any) -> Any:
    return {key: value for key, value in facts.items() if key != "flags"} if isinstance(facts, Mapping) else facts
