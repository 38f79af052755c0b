"""How a search went: the race, the effect of each knob, failures, and predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from headrace.bench.report.document import Code, Details, Note, Part, Section, Table
from headrace.bench.values import NOT_AVAILABLE, found, interval, is_number, number, percent, plain, times
from headrace.tune.charts import effect_charts, failure_charts, prediction_charts, race_charts
from headrace.tune.ratios import Row, default_of, effects_of, predictions_of, rank_correlation, ratios_by_rung, rows_of
from headrace.tune.report_words import Missing, Record, counted, figure_of, joined_names, only_one


def race_section(record: Record, missing: Missing) -> Section | None:
    default = default_of(record)
    rungs = record.get("rungs") or []
    if default is None or not rungs:
        missing.append(("the race", only_one(record) or "no rung was finished"))
        return None
    keys = ("entered", "kept", "added")
    counts = [
        [plain(rung.get("rung")), plain(rung.get("num_requests")), *(str(len(rung.get(key) or [])) for key in keys)]
        for rung in rungs
    ]
    caption = "The default is measured in every rung, whatever its score. Added: new combinations of the best values"
    table = Table(["rung", "requests", *keys], counts, caption=caption)
    names = [[plain(rung.get("rung")), *(joined_names(rung.get(key)) for key in keys)] for rung in rungs]
    details = Details("Who entered, was kept and was added", [Table(["rung", *keys], names, num_text_columns=4)])
    return Section("The race", [*race_charts(record), table, *_scores(record, default, rungs), details])


def _scores(record: Record, default: Row, rungs: Sequence[Mapping[str, Any]]) -> list[Part]:
    numbers = [int(rung["rung"]) for rung in rungs if is_number(rung.get("rung"))]
    measured = [(row, ratios_by_rung(row, default)) for row in rows_of(record) if row is not default]
    measured = [(row, ratios) for row, ratios in measured if ratios]
    measured.sort(key=lambda each: (-max(each[1]), -each[1][max(each[1])]))
    cells = [
        [
            str(row["name"]),
            *(times(ratios[rung]) if rung in ratios else "" for rung in numbers),
            times(row.get("score")),
            _outcome(row, ratios, rungs),
        ]
        for row, ratios in measured
    ]
    if not cells:
        return []
    columns = ["config", *(f"rung {rung}" for rung in numbers), "score", "then"]
    return [Table(columns, cells, caption="Ratio to the default of the same round")]


def _outcome(row: Row, ratios: Mapping[int, float], rungs: Sequence[Mapping[str, Any]]) -> str:
    """What became of a config after its last rung."""
    if row.get("is_finalist"):
        return "finalist"
    if row.get("status") == "failed":
        return "failed"
    last = next((rung for rung in rungs if rung.get("rung") == max(ratios)), {})
    return "kept" if row.get("name") in (last.get("kept") or []) else "dropped"


def effects_section(record: Record, missing: Missing) -> Section | None:
    effects = effects_of(record)
    if not effects:
        why = "no config was measured in the same round as the default"
        missing.append(("effect of each knob", only_one(record) or why))
        return None
    knobs = {knob["name"]: knob for knob in record.get("knobs") or []}
    rows = [
        [
            effect.knob,
            plain(effect.value),
            "default" if effect.is_default else "this knob alone" if effect.is_alone else "with other changes, median",
            "restart" if knobs[effect.knob].get("needs_restart") else "live",
            times(effect.ratio),
            "" if effect.num_configs < 2 else f"{times(effect.low)} to {times(effect.high)}",
            "" if effect.is_default else str(effect.num_configs),
        ]
        for effect in effects
    ]
    columns = ["knob", "value", "measured", "change needs", "ratio to the default", "range over configs", "configs"]
    table = Table(columns, rows, num_text_columns=4)
    unused = [name for name in knobs if name not in {effect.knob for effect in effects}]
    parts: list[Part] = [*effect_charts(record), table]
    if unused:
        parts.append(Note(f"Not measured with another value: {', '.join(unused)}."))
    whys = [[name, plain(knob.get("values")), str(knob.get("why") or "")] for name, knob in knobs.items()]
    parts.append(Details("Why each knob was searched", [Table(["knob", "values", "why"], whys, num_text_columns=3)]))
    return Section("Effect of each knob", parts)


def failures_section(record: Record) -> Section | None:
    rows = rows_of(record)
    failed = [row for row in rows if row.get("status") == "failed"]
    ruled_out = [row for row in rows if row.get("status") == "ruled out"]
    if not failed and not ruled_out:
        return None
    charts = failure_charts(record)
    parts: list[Part] = [*charts]
    if failed:
        cells = [_failure(row, ruled_out) for row in failed]
        columns = ["config", "failed at", "class", "message", "ruled out"]
        parts.append(Table(columns, cells, num_text_columns=5))
    if ruled_out:
        cells = [
            [str(row["name"]), str(found(row, "ruled_out_by", "config") or NOT_AVAILABLE), _why(row)]
            for row in ruled_out
        ]
        parts.append(Table(["ruled out", "by the failure of", "why"], cells, num_text_columns=3))
    if not charts:
        parts.append(Note("There is no grid: no knob that grows memory had several values."))
    for row in failed:
        if tail := found(row, "failure", "log_tail"):
            parts.append(Details(f"End of the log: {row['name']}", [Code(str(tail))]))
    return Section("Failures, and what they ruled out", parts)


def _failure(row: Row, ruled_out: Sequence[Row]) -> list[str]:
    names = [str(each["name"]) for each in ruled_out if found(each, "ruled_out_by", "config") == row.get("name")]
    facts = [plain(found(row, "failure", key) or NOT_AVAILABLE) for key in ("stage", "kind", "message")]
    return [str(row["name"]), *facts, "; ".join(names) or "only itself"]


def _why(row: Row) -> str:
    return str(found(row, "ruled_out_by", "why") or NOT_AVAILABLE)


def predictions_section(record: Record, missing: Missing) -> Section | None:
    pairs = predictions_of(record)
    label, unit = figure_of(record)
    if not pairs:
        missing.append(("predicted against measured", "no measured config has a prediction"))
        return None
    rows = [
        [
            each.name,
            number(each.predicted, unit),
            NOT_AVAILABLE if each.low is None else interval(each.low, each.high),
            number(each.measured, unit),
            f"{100 * each.error:+.1f} %",
        ]
        for each in sorted(pairs, key=lambda each: -each.predicted)
    ]
    columns = ["config", f"predicted {label}", "range", "measured", "error"]
    parts: list[Part] = [*prediction_charts(record, label), Table(columns, rows)]
    return Section("Predicted against measured", [*parts, Note(_agreement_of(pairs))])


def _agreement_of(pairs: Sequence[Any]) -> str:
    errors = [abs(each.error) for each in pairs]
    with_range = [each for each in pairs if each.low is not None]
    inside = sum(each.low <= each.measured <= each.high for each in with_range)
    text = f"Median error of the prediction: {percent(median(errors))} over {counted(len(pairs), 'config')}"
    if with_range:
        text += f"; {inside} of {len(with_range)} measured values are within the predicted range"
    rank = rank_correlation([(each.predicted, each.measured) for each in pairs])
    if rank is None:
        return f"{text}. Rank correlation: not available, because fewer than three configs differ."
    words = (
        "the predicted order is nearly the measured one"
        if rank >= 0.8
        else "the predicted order is roughly the measured one"
        if rank >= 0.5
        else "the predicted order says little about the measured one"
        if rank > -0.5
        else "the predicted order is nearly the reverse of the measured one"
    )
    return f"{text}. Rank correlation (Spearman) {rank:.2f}: {words}."
