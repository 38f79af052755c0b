"""The charts of a tune's report: finalists, race, knobs, failures, prediction, throughput against latency, latencies.

Each function returns charts, or none where the record has nothing to draw. The chosen config and the default have the
same colour and marker in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from headrace.bench.levels import load_label
from headrace.bench.report.bars import MAX_LABEL, Bar, bar_chart
from headrace.bench.report.document import Chart
from headrace.bench.report.grid import Box, Tone, grid_chart
from headrace.bench.report.scales import Axis
from headrace.bench.report.xy import MAX_NAME, Limit, Point, Series, pareto, xy_chart
from headrace.bench.slo import Slo
from headrace.bench.statistics import Interval
from headrace.bench.values import NOT_AVAILABLE, found, interval, is_number, number, plain, times
from headrace.errors import ConfigError
from headrace.tune.ratios import (
    Row,
    chosen_of,
    confirmed_ratio,
    default_of,
    effects_of,
    finalists_of,
    levels_of,
    predictions_of,
    ratios_by_rung,
    rows_of,
    trials_of,
    value_in,
)

Record = Mapping[str, Any]
CHOSEN, DEFAULT, FRONTIER = 0, 1, 2  # places of their colours
OTHER_FINALISTS = (4, 3, 2)
AGAIN = "default, measured again"
DROPPED = ("max_num_", "enable_")  # of setting names, where there is little room
MAX_EFFECTS = 24
MAX_GRID = 8  # values of a knob
LATENCIES = {"ttft": "time to first token", "tpot": "time per output token", "e2e": "end-to-end latency"}
PERCENTILES = (50, 95, 99)
SEQUENCE_SPEED = "sequence_tokens_per_s"  # of a batch: mean output tokens/s of one running sequence


def finalist_charts(record: Record) -> list[Chart]:
    """Ratios of the confirmation, with the default against itself: its interval is the noise."""
    default = default_of(record)
    noise = record.get("noise") or {}
    if default is None:
        return []
    bars = []
    if all(is_number(noise.get(key)) for key in ("ratio", "low", "high")):
        again = Interval(noise["ratio"], noise["low"], noise["high"])
        bars.append(Bar(AGAIN, again.value, ratio_text(again), again.low, again.high, place=DEFAULT))
    for number_of, row in enumerate(row for row in finalists_of(record) if not row.get("is_default")):
        ratio = confirmed_ratio(record, row, default)
        if ratio is not None:
            place = CHOSEN if row is chosen_of(record) else OTHER_FINALISTS[number_of % len(OTHER_FINALISTS)]
            name = _label_of(row, MAX_LABEL, is_chosen=row is chosen_of(record))
            bars.append(Bar(name, ratio.value, ratio_text(ratio), ratio.low, ratio.high, place=place))
    if not any(bar.label != AGAIN for bar in bars):
        return []
    title = "Finalists against the default"
    axis = Axis("ratio to the default of the same round", starts_at_zero=False)
    chart = bar_chart(bars, axis, title=title, mark=1.0, are_dots=True)
    caption = "With 95 % intervals over the rounds of the confirmation. An interval that holds 1 shows no difference."
    return [Chart(title, chart, caption)]


def race_charts(record: Record) -> list[Chart]:
    default = default_of(record)
    if default is None:
        return []
    chosen = chosen_of(record)
    by_row = [(row, ratios_by_rung(row, default)) for row in rows_of(record) if row is not default]
    by_row = [(row, ratios) for row, ratios in by_row if ratios]
    rungs = sorted({rung for _, ratios in by_row for rung in ratios})
    if not rungs:
        return []
    quiet = [_race_line(row, ratios, is_quiet=True) for row, ratios in by_row if not _stands_out(row, chosen)]
    loud = [
        _race_line(row, ratios, place=CHOSEN if row is chosen else OTHER_FINALISTS[place % len(OTHER_FINALISTS)])
        for place, (row, ratios) in enumerate(
            sorted(((r, x) for r, x in by_row if _stands_out(r, chosen)), key=lambda each: each[0] is not chosen)
        )
    ]
    own = "default (chosen)" if chosen is default else "default"
    base = Series(own, [Point(rung, 1.0) for rung in rungs], is_dashed=len(rungs) > 1, place=DEFAULT)
    title = "The race: ratio to the default in each rung"
    x = Axis("rung", starts_at_zero=False, ticks=tuple(map(float, rungs)))
    chart = xy_chart(
        [*quiet, base, *reversed(loud)], x=x, y=Axis("ratio to the default", starts_at_zero=False), title=title
    )
    caption = (
        "Grey: configs that did not reach the confirmation. Each is divided by the default of the same round; the "
        "table has the numbers."
    )
    return [Chart(title, chart, caption)]


def effect_charts(record: Record) -> list[Chart]:
    effects = effects_of(record)[:MAX_EFFECTS]
    if not effects:
        return []
    bars = [
        Bar(
            f"{effect.knob} = {plain(effect.value)}",
            effect.ratio,
            "default" if effect.is_default else times(effect.ratio) + ("" if effect.is_alone else " *"),
            None if effect.num_configs < 2 else effect.low,
            None if effect.num_configs < 2 else effect.high,
            place=DEFAULT if effect.is_default else CHOSEN,
        )
        for effect in effects
    ]
    title = "Effect of each knob"
    axis = Axis("ratio to the default of the same round", starts_at_zero=False)
    caption = (
        "A dot is the config that changes this knob only; with * none was measured, and it is the median of configs "
        "that change others too. The range is over all configs with the value."
    )
    return [Chart(title, bar_chart(bars, axis, title=title, mark=1.0, are_dots=True), caption)]


def failure_charts(record: Record) -> list[Chart]:
    """The two memory-growing knobs that vary most: where configs worked, failed and were ruled out."""
    rows = [row for row in rows_of(record) if row.get("status") in ("ok", "failed", "ruled out", "not run")]
    if not any(row.get("status") in ("failed", "ruled out") for row in rows):
        return []
    knobs = [knob for knob in record.get("knobs") or [] if knob.get("grows_memory")]
    spread = {knob["name"]: _distinct(rows, knob) for knob in knobs}
    knobs = sorted((knob for knob in knobs if len(spread[knob["name"]]) > 1), key=lambda k: -len(spread[k["name"]]))
    if not knobs:
        return []
    x, y = knobs[0], knobs[1] if len(knobs) > 1 else None
    columns = spread[x["name"]][:MAX_GRID]
    lines = spread[y["name"]][:MAX_GRID] if y is not None else [None]
    boxes = {}
    for column, first in enumerate(columns):
        for line, second in enumerate(lines):
            here = [row for row in rows if value_in(row, x) == first and (y is None or value_in(row, y) == second)]
            if here:
                boxes[column, line] = _box(here)
    title = "What failed, and what it ruled out"
    chart = grid_chart(
        [plain(value) for value in columns],
        [plain(value) for value in lines] if y is not None else ["configs"],
        boxes,
        x_label=x["name"],
        y_label=y["name"] if y is not None else "",
        title=title,
    )
    others = [knob["name"] for knob in knobs[2:]]
    more = f" Configs of one box differ in other settings, such as {', '.join(others)}." if others else ""
    marks = "✓ worked, ✗ failed, – ruled out, with the number of configs; red: out of memory."
    return [Chart(title, chart, f"{marks} Empty boxes are pairs of values that no config has.{more}")]


def prediction_charts(record: Record, unit: str) -> list[Chart]:
    pairs = predictions_of(record)
    if len(pairs) < 2:
        return []
    chosen, default = chosen_of(record), default_of(record)
    names = {str(row["name"]): place for row, place in ((default, DEFAULT), (chosen, CHOSEN)) if row is not None}
    ends = [edge for each in pairs for edge in (each.predicted, each.measured)]
    diagonal = [Point(end, end) for end in (min(ends), max(ends))]
    series = [Series("predicted = measured", diagonal, is_dashed=True, place=5, is_marked=False)]
    for label, place in (("other configs", FRONTIER), ("default", DEFAULT), ("chosen", CHOSEN)):
        points = [
            Point(
                each.measured,
                each.predicted,
                each.low,
                each.high,
                title=f"{each.name}: predicted {number(each.predicted)}, measured {number(each.measured)}",
            )
            for each in pairs
            if names.get(each.name, FRONTIER) == place
        ]
        if points:
            series.append(Series(label, points, "points", place=place))
    title = "Predicted against measured"
    chart = xy_chart(
        series,
        x=Axis(f"measured ({unit})", starts_at_zero=False),
        y=Axis(f"predicted ({unit})", starts_at_zero=False),
        title=title,
    )
    return [Chart(title, chart, "Whiskers: the range of the prediction. On the line it was exact.")]


def trade_off_charts(record: Record) -> list[Chart]:
    """Throughput against latency over the load levels of each config (serve), or against the speed of one sequence."""
    if record.get("goal") == "batch":
        return _batch_trade_off(record)
    charts = []
    for name in ("ttft_p95", "tpot_p95"):
        label = f"{name.split('_')[0].upper()} p95"
        found_points = {
            str(row["name"]): _level_points(row, name) for row in rows_of(record) if _level_points(row, name)
        }
        if not found_points:
            continue
        title = f"Output tokens/s against {label}, by load level"
        y = Axis(f"{label} (ms)")
        limits = _limits(record, name)
        charts.append(
            Chart(
                title,
                xy_chart(
                    _trade_off_series(record, found_points, y_is_cost=True),
                    x=Axis("output tokens/s"),
                    y=y,
                    title=title,
                    limits=limits,
                ),
                "Lower right is better. One point for each load level of a config; grey: configs that were not chosen.",
            )
        )
    return charts


def latency_charts(record: Record) -> list[Chart]:
    """Percentiles of the chosen config and the default, over the rounds of the confirmation."""
    chosen, default = chosen_of(record), default_of(record)
    rows = [(row, name, place) for row, name, place in ((default, "default", DEFAULT), (chosen, "chosen", CHOSEN))]
    if chosen is default:
        rows = [(default, "default (chosen)", DEFAULT)]
    charts = []
    for latency, label in LATENCIES.items():
        series = []
        for row, name, place in rows:
            points = [] if row is None else [p for p in (_percentile(row, latency, pct) for pct in PERCENTILES) if p]
            if points:
                series.append(Series(name, points, place=place, is_labelled_below=place == CHOSEN))
        if series:
            title = f"{label[0].upper()}{label[1:]}"
            x = Axis("percentile", starts_at_zero=False, ticks=tuple(map(float, PERCENTILES)))
            chart = xy_chart(series, x=x, y=Axis(f"{latency.upper()} (ms)"), title=title)
            charts.append(Chart(title, chart, "Means over rounds; whiskers: the lowest and the highest round."))
    return charts


def latency_values(row: Row, latency: str, percent: int) -> list[float]:
    """A latency percentile of each round: of the confirmation, or of the race if there was none."""
    trials = trials_of(row, "confirm") or trials_of(row, "race")
    values = [found(trial, "figures", f"{latency}_p{percent}") for trial in trials]
    return [float(value) for value in values if is_number(value)]


def short_name(name: str, max_chars: int) -> str:
    """A config's name for a chart. Cut in the middle: names of combined settings differ at their ends."""
    if len(name) > max_chars:
        for prefix in DROPPED:
            name = name.replace(prefix, "")
    if len(name) <= max_chars:
        return name
    half = (max_chars - 1) // 2
    return f"{name[: max_chars - 1 - half].rstrip()}…{name[-half:].lstrip()}"


def ratio_text(ratio: Interval | None) -> str:
    """`1.37x [1.33, 1.41]`."""
    return NOT_AVAILABLE if ratio is None else f"{times(ratio.value)} [{ratio.low:.2f}, {ratio.high:.2f}]"


def _label_of(row: Row, max_chars: int, *, is_chosen: bool) -> str:
    prefix = "chosen: " if is_chosen else ""
    return prefix + short_name(str(row["name"]), max_chars - len(prefix))


def _stands_out(row: Row, chosen: Row | None) -> bool:
    return bool(row is chosen or row.get("is_finalist"))


def _race_line(row: Row, ratios: Mapping[int, float], *, place: int | None = None, is_quiet: bool = False) -> Series:
    name = str(row["name"])
    points = [
        Point(
            rung,
            ratio,
            title=f"{name}, rung {rung}: {times(ratio)}",
        )
        for rung, ratio in ratios.items()
    ]
    label = _label_of(row, 2 * MAX_NAME, is_chosen=place == CHOSEN)
    return Series(label, points, place=place, is_quiet=is_quiet)


def _distinct(rows: Sequence[Row], knob: Mapping[str, Any]) -> list[Any]:
    values = list(dict.fromkeys(value_in(row, knob) for row in rows))
    return sorted(values, key=lambda value: (not is_number(value), value if is_number(value) else str(value)))


def _box(rows: Sequence[Row]) -> Box:
    """All configs of one pair of values. Out of memory decides the colour; other failures do if nothing worked."""
    by_status: dict[str, list[Row]] = {}
    for row in rows:
        by_status.setdefault(str(row.get("status")), []).append(row)
    shown = [(status, mark, len(by_status[status])) for status, mark in _MARKS.items() if status in by_status]
    if len(shown) == 1:
        ((status, mark, count),) = shown
        words = f"{mark} {status}" + (f" ({count})" if count > 1 else "")
    else:
        words = "  ".join(f"{mark} {count}" for _, mark, count in shown)
    is_full = any(found(row, "failure", "kind") == "oom" for row in rows)
    tone: Tone = "bad" if is_full else next((tone for status, tone in _TONES if status in by_status), "plain")
    title = "; ".join(f"{row['name']}: {row.get('status')}{_why(row)}" for row in rows)
    return Box(words, tone, title)


_MARKS = {"ok": "✓", "failed": "✗", "ruled out": "–", "not run": "·"}
_TONES: tuple[tuple[str, Tone], ...] = (("ok", "good"), ("failed", "bad"), ("ruled out", "unsure"))


def _why(row: Row) -> str:
    kind = found(row, "failure", "kind")
    by = found(row, "ruled_out_by", "config")
    return f" ({kind})" if kind else f" (by {by})" if by else ""


def _limits(record: Record, name: str) -> list[Limit]:
    """The SLO's limits of this latency, if it has any."""
    latency = name.partition("_")[0]
    try:
        slo = Slo.parse(str(record["slo"])) if record.get("slo") else None
    except ConfigError:
        return []  # an SLO of another version: the chart does without its line
    conditions = [] if slo is None else [each for each in slo.conditions if each.name == latency]
    return [Limit(1000 * each.limit_s, f"SLO: {each.text}") for each in conditions]


def _level_points(row: Row, latency: str) -> list[Point]:
    """One point for each load, the mean of its rounds, by rising load."""
    by_load: dict[str, list[tuple[float, float]]] = {}
    for load, figures in levels_of(row):
        x, y = figures.get("output_tokens_per_s"), figures.get(latency)
        if is_number(x) and is_number(y):
            by_load.setdefault(load_label(load), []).append((float(x), float(y)))  # type: ignore[arg-type]
    points = []
    for label, places in by_load.items():
        x, y = (fmean(place[side] for place in places) for side in (0, 1))
        title = f"{row['name']}, {label}: {number(x)} tokens/s, {number(y)} ms"
        points.append(Point(x, y, title=title, label=label.removesuffix(" concurrent")))
    return sorted(points, key=lambda point: point.x)


def _trade_off_series(record: Record, points: Mapping[str, Sequence[Point]], *, y_is_cost: bool) -> list[Series]:
    chosen, default = found(record, "decision", "chosen"), default_of(record)
    own = None if default is None else str(default["name"])
    quiet = [
        Series(name, [Point(p.x, p.y, title=p.title) for p in each], "points", is_quiet=True)
        for name, each in points.items()
        if name not in (chosen, own)
    ]
    everything = [(p.x, p.y) for each in points.values() for p in each]
    places = [everything[place] for place in pareto(everything, y_is_cost=y_is_cost)]
    series = [
        *quiet,
        Series("best trade-offs", [Point(*place) for place in places], is_dashed=True, place=5, is_marked=False),
    ]
    if own is not None and own in points:
        label = "default (chosen)" if own == chosen else "default"
        series.append(Series(label, points[own], place=DEFAULT, is_labelled_below=True))
    if chosen in points and chosen != own:
        series.append(Series(f"chosen: {short_name(str(chosen), MAX_NAME)}", points[str(chosen)], place=CHOSEN))
    return series


def _batch_trade_off(record: Record) -> list[Chart]:
    points = {}
    for row in rows_of(record):
        places = [
            (float(trial["figures"]["output_tokens_per_s"]), float(trial["figures"][SEQUENCE_SPEED]))
            for trial in trials_of(row)
            if is_number(found(trial, "figures", SEQUENCE_SPEED))
            and is_number(found(trial, "figures", "output_tokens_per_s"))
        ]
        if places:
            x, y = (fmean(place[side] for place in places) for side in (0, 1))
            title = f"{row['name']}: {number(x)} output tokens/s, {number(y)} of one sequence"
            points[str(row["name"])] = [Point(x, y, title=title)]
    if len(points) < 2:
        return []
    title = "Throughput against the speed of one sequence"
    chart = xy_chart(
        _trade_off_series(record, points, y_is_cost=False),
        x=Axis("output tokens/s of the whole batch", starts_at_zero=False),
        y=Axis("output tokens/s of one sequence", starts_at_zero=False),
        title=title,
    )
    return [Chart(title, chart, "Upper right is better. Grey: configs that were not chosen.")]


def _percentile(row: Row, latency: str, percent: int) -> Point | None:
    values = latency_values(row, latency, percent)
    if not values:
        return None
    low, high = (min(values), max(values)) if len(values) > 1 else (None, None)
    title = f"{row['name']}, p{percent}: {number(fmean(values), 'ms')} ({interval(min(values), max(values))})"
    return Point(float(percent), fmean(values), low, high, label=number(fmean(values)), title=title)
