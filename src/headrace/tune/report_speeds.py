"""Throughput against latency, and the latencies, of the configs of a tune."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from headrace.bench.levels import load_label
from headrace.bench.report.document import Chart, Details, Note, Section, Table
from headrace.bench.report.sweep import LABELS
from headrace.bench.values import NOT_AVAILABLE, found, is_number, number
from headrace.tune.charts import (
    LATENCIES,
    PERCENTILES,
    SEQUENCE_SPEED,
    latency_charts,
    latency_values,
    trade_off_charts,
)
from headrace.tune.ratios import chosen_of, default_of, levels_of, rows_of, trials_of, values_of
from headrace.tune.report_words import Missing, Record, loads_of, only_one


def trade_off_section(record: Record, missing: Missing) -> Section | None:
    charts: list[Chart] = trade_off_charts(record)
    if charts and record.get("goal") == "batch":
        speeds = Details("Speeds of each config", [_sequence_speeds(record)])
        return Section("Throughput against the speed of one sequence", [*charts, speeds])
    if charts:
        return Section("Throughput against latency", [*charts, _levels(record)])
    why = only_one(record) or (
        f"the record has no speed of one sequence ({SEQUENCE_SPEED}) of several configs"
        if record.get("goal") == "batch"
        else "no load level has both output tokens/s and a latency"
    )
    missing.append(("Pareto curve", why))
    return None


def _sequence_speeds(record: Record) -> Table:
    rows = []
    for row in rows_of(record):
        speeds = [float(t["figures"][SEQUENCE_SPEED]) for t in trials_of(row) if _has(t, SEQUENCE_SPEED)]
        if speeds:
            rows.append([str(row["name"]), number(fmean(values_of(row))), number(fmean(speeds))])
    return Table(["config", "output tokens/s", "of one sequence"], rows)


def _has(trial: Mapping[str, Any], name: str) -> bool:
    return is_number(found(trial, "figures", name))


def _levels(record: Record) -> Details:
    names = ("output_tokens_per_s", "goodput_requests_per_s", "ttft_p95", "tpot_p95")
    rows = []
    for row in rows_of(record):
        by_load: dict[str, list[Mapping[str, Any]]] = {}
        for load, figures in levels_of(row):
            by_load.setdefault(load_label(load), []).append(figures)
        for label, several in by_load.items():
            values = [[float(each[name]) for each in several if is_number(each.get(name))] for name in names]
            means = [
                number(fmean(each), LABELS[name].unit) if each else NOT_AVAILABLE
                for name, each in zip(names, values, strict=True)
            ]
            rows.append([str(row["name"]), label, *means, str(len(several))])
    columns = ["config", "load", *(LABELS[name].label for name in names), "rounds"]
    return Details(f"Load levels ({len(rows)})", [Table(columns, rows, num_text_columns=2)])


def latencies_section(record: Record, missing: Missing) -> Section | None:
    charts = latency_charts(record)
    if not charts:
        why = "a batch is measured as a whole run" if record.get("goal") == "batch" else "the record has no percentiles"
        missing.append(("latency distributions", why))
        return None
    chosen, default = chosen_of(record), default_of(record)
    rows = [(row, name) for row, name in ((default, "default"), (chosen, "chosen")) if row is not None]
    if chosen is default:
        rows = rows[:1]
    cells = []
    for latency in LATENCIES:
        for row, name in rows:
            values = [latency_values(row, latency, each) for each in PERCENTILES]
            if any(values):
                means = [number(fmean(each), "ms") if each else NOT_AVAILABLE for each in values]
                cells.append([latency.upper(), f"{name}: {row['name']}" if name == "chosen" else name, *means])
    table = Table(["latency", "config", *(f"p{each}" for each in PERCENTILES)], cells, num_text_columns=2)
    same = "" if len({loads_of(row) for row, _ in rows}) < 2 else " The two were measured at different loads."
    note = "Percentiles of each round at its best load level; request rows are not kept in the record." + same
    return Section("Latency distributions", [*charts, table, Note(note)])
