"""The report of any record, by its kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.bench.levels import rows_of
from headrace.bench.record import RecordError
from headrace.bench.report.batching import batching_report
from headrace.bench.report.document import Report
from headrace.bench.report.offline import offline_report
from headrace.bench.report.online import online_report
from headrace.bench.report.sweep import sweep_report


def build_report(record: Mapping[str, Any], directory: Path | None = None) -> Report:
    """`directory` holds the request rows of the record, if they were kept."""
    kind = record.get("kind")
    if kind == "offline":
        return offline_report(record)
    if kind == "online":
        return online_report(record, rows_of(record, directory))
    if kind == "batching":
        return batching_report([record])
    if kind == "sweep":
        return sweep_report(record)
    raise RecordError(f"there is no report for a record of kind {kind!r} (known: offline, online, batching, sweep)")
