"""The finalists of a tune against the default, with the noise floor."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from headrace.bench.report.document import Cell, Note, Part, Section, Table
from headrace.bench.values import NOT_AVAILABLE, found, interval, is_number, number, percent
from headrace.tune.charts import finalist_charts, ratio_text
from headrace.tune.ratios import (
    Row,
    chosen_of,
    confirmed_ratio,
    confirmed_value,
    default_of,
    finalists_of,
    trials_of,
    values_of,
)
from headrace.tune.report_words import Missing, Record, figure_of, loads_of, only_one, own_settings


def finalists_section(record: Record, missing: Missing) -> Section | None:
    default = default_of(record)
    rows = [row for row in finalists_of(record) if trials_of(row, "confirm")]
    if default is None or not rows:
        missing.append(
            ("finalists against the default", only_one(record) or "no round of the confirmation was finished")
        )
        return None
    label, unit = figure_of(record)
    loads = list(dict.fromkeys(load for row in rows if (load := loads_of(row))))
    has_load = len(loads) > 1
    columns = [label, "95 % interval", "ratio to the default [95 %]", "difference"]
    own = own_settings(rows)
    cells = [
        [str(row["name"]), *own.get(str(row["name"]), []), *_finalist(record, row, default, unit, has_load=has_load)]
        for row in rows
    ]
    names = ["config", *(["settings"] if own else [])]
    table = Table([*names, *columns, *(["load"] if has_load else []), "rounds"], cells, num_text_columns=len(names))
    parts: list[Part] = [*finalist_charts(record), table, Note(_noise(record))]
    if len(loads) == 1:
        parts.append(Note(f"Load of all rounds: {loads[0]}."))
    return Section("Finalists against the default", parts)


def _finalist(record: Record, row: Row, default: Row, unit: str, *, has_load: bool) -> list[str | Cell]:
    value, values = confirmed_value(row), values_of(row, "confirm")
    ratio = None if row is default else confirmed_ratio(record, row, default)
    is_chosen = row is chosen_of(record)
    if row is default:
        difference: str | Cell = Cell("chosen", "good") if is_chosen else ""
    elif ratio is None:
        difference = Cell("no interval: too few rounds", "unsure")
    elif ratio.holds(1.0) or abs(ratio.value - 1) < _floor(record):
        difference = Cell("no difference shown", "unsure")
    else:
        faster = "better" if ratio.value > 1 else "worse"
        difference = Cell(f"{faster}, chosen" if is_chosen else faster, "good" if ratio.value > 1 else "bad")
    return [
        number(fmean(values), unit),
        NOT_AVAILABLE if value is None else interval(value.low, value.high),
        "1" if row is default else ratio_text(ratio),
        difference,
        *([loads_of(row)] if has_load else []),
        str(len(values)),
    ]


def _floor(record: Record) -> float:
    floor = found(record, "noise", "floor")
    return float(floor) if is_number(floor) else 0.0


def _noise(record: Record) -> str:
    noise = record.get("noise") or {}
    if not is_number(noise.get("floor")):
        return "Noise floor: not available, because the default was not measured twice in enough rounds."
    edges = f" [{noise['low']:.3f}, {noise['high']:.3f}]" if is_number(noise.get("low")) else ""
    return (
        f"Noise floor: the default was measured twice in each of {noise.get('num_rounds')} rounds; the ratio of the "
        f"two is {noise['ratio']:.3f}{edges}. A gain below {percent(noise['floor'])} cannot be told from noise: then "
        f"the default is kept.{_drift(noise)}"
    )


def _drift(noise: Mapping[str, Any]) -> str:
    low, high = noise.get("low"), noise.get("high")
    if low is None or high is None or low <= 1 <= high:
        return ""
    return " The interval does not hold 1: something changes within a round, so small gains are doubtful."
