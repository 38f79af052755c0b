"""What batching gives: the same workload at several batch sizes, with static and with continuous batching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from headrace.bench.levels import figures_of, levels_of, load_amount
from headrace.bench.report.document import Chart, Note, Report, Section, Table
from headrace.bench.report.offline import values_of
from headrace.bench.report.run_facts import run_section, subtitle_of, title_of
from headrace.bench.report.scales import Axis
from headrace.bench.report.xy import Point, Series, xy_chart
from headrace.bench.values import NOT_AVAILABLE, found, is_number, milliseconds, number, times

STATIC = "static_batch"


@dataclass(frozen=True, slots=True)
class BatchingRow:
    """One measurement. `batch_size` is how many sequences run at most at a time."""

    batch_size: int
    is_static: bool
    tokens_per_s: float | None
    tpot_ms: float | None = None

    @property
    def label(self) -> str:
        return "static batching" if self.is_static else "continuous batching"


def batching_rows(records: Sequence[Mapping[str, Any]]) -> list[BatchingRow]:
    """A row for each offline record (its max_num_seqs in force) and each level of an online one (its concurrency), or
    the rows of a record of `bench batching`."""
    rows = []
    for record in records:
        if record.get("kind") == "batching":
            rows += [_measured_row(row) for row in record["rows"] if "failure" not in row]
            continue
        is_static = _setting(record, "capacity_policy") == STATIC
        if record.get("rounds"):
            rates = values_of(record["rounds"], "output_tokens_per_s")
            size = _setting(record, "max_num_seqs")
            if is_number(size):
                rows.append(BatchingRow(int(size), is_static, median(rates) if rates else None))
            continue
        for level in levels_of(record):
            size, figures = load_amount(level.get("load")), figures_of(level)
            if size is not None and found(level, "load", "concurrency") is not None:
                rate = figures.get("output_tokens_per_s")
                rows.append(BatchingRow(int(size), is_static, rate, found(figures, "tpot_ms", "p50")))
    return sorted(rows, key=lambda row: (row.batch_size, not row.is_static))


def _measured_row(row: Mapping[str, Any]) -> BatchingRow:
    return BatchingRow(row["batch_size"], row["batching"] == "static", row["output_tokens_per_s"])


def batching_report(records: Sequence[Mapping[str, Any]]) -> Report:
    """The table, from records of one model and workload."""
    rows = batching_rows(records)
    record = records[0] if records else {}
    return Report(
        title_of(record, "What batching gives"),
        subtitle_of(record),
        headline=_headline(rows),
        warnings=_warnings(records),
        sections=[Section("Batch sizes", [_chart(rows), batching_table(rows), _note()]), run_section(record)],
    )


def batching_table(rows: Sequence[BatchingRow]) -> Table:
    one = _alone(rows)
    cells = [
        [
            f"{row.batch_size:,}",
            row.label if row.batch_size > 1 else "one at a time",
            number(row.tokens_per_s),
            times(_ratio(row.tokens_per_s, one)),
            times(_ratio(row.tokens_per_s, _static(rows, row))) if not row.is_static and row.batch_size > 1 else "",
            number(_ratio(row.tokens_per_s, float(row.batch_size))),
            milliseconds(row.tpot_ms),
        ]
        for row in rows
    ]
    columns = [
        "batch size",
        "batching",
        "output tokens/s",
        "of batch 1",
        "of static batching",
        "tokens/s per sequence",
        "TPOT p50",
    ]
    return Table(columns, cells, num_text_columns=2)


def _note() -> Note:
    return Note(
        "Static batching starts a batch only when all sequences of the last one have ended, so that short answers wait "
        "for the longest. Continuous batching fills a slot as soon as it is free. Answers of equal length hide the "
        "difference."
    )


def _headline(rows: Sequence[BatchingRow]) -> str:
    one = _alone(rows)
    best = max(
        (row for row in rows if row.tokens_per_s is not None), key=lambda row: row.tokens_per_s or 0.0, default=None
    )
    if best is None or one is None or best.batch_size == 1:
        return "There is no batch size to compare with batch 1."
    gain = f"Batch {best.batch_size:,} gives {times(_ratio(best.tokens_per_s, one))} the tokens/s of batch 1"
    static = _static(rows, best)
    if best.is_static or static is None:
        return gain + "."
    return f"{gain}, and {times(_ratio(best.tokens_per_s, static))} those of static batching at the same size."


def _chart(rows: Sequence[BatchingRow]) -> Chart:
    series = [
        Series(
            "static batching" if is_static else "continuous batching",
            [
                Point(
                    row.batch_size,
                    row.tokens_per_s,
                    title=f"batch {row.batch_size:,}: {number(row.tokens_per_s)} tokens/s",
                )
                for row in rows
                if row.tokens_per_s is not None and (row.is_static == is_static or row.batch_size == 1)
            ],
        )
        for is_static in (False, True)
        if any(row.is_static == is_static for row in rows)
    ]
    title = "Throughput over batch size"
    ticks = tuple(float(size) for size in sorted({row.batch_size for row in rows}))
    x, y = Axis("batch size (log scale)", is_log=True, ticks=ticks), Axis("output tokens/s")
    return Chart(title, xy_chart(series, x=x, y=y, title=title))


def _warnings(records: Sequence[Mapping[str, Any]]) -> list[str]:
    warnings = [str(warning) for record in records for warning in record.get("warnings") or []]
    for name, path in (
        ("workload", ("workload", "hash")),
        ("model", ("model", "name")),
        ("engine", ("engine", "name")),
    ):
        values = {str(found(record, *path) or NOT_AVAILABLE) for record in records}
        if len(values) > 1:
            warnings.insert(0, f"rows are not of the same {name}: {', '.join(sorted(values))}")
    return list(dict.fromkeys(warnings))


def _setting(record: Mapping[str, Any], name: str) -> Any:
    return found(record, "engine", "settings", name, "value")


def _alone(rows: Sequence[BatchingRow]) -> float | None:
    return next((row.tokens_per_s for row in rows if row.batch_size == 1), None)


def _static(rows: Sequence[BatchingRow], like: BatchingRow) -> float | None:
    return next((row.tokens_per_s for row in rows if row.is_static and row.batch_size == like.batch_size), None)


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
