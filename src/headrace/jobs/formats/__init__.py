"""Inputs and outputs of every kind: `open_source` gives lines, `open_sink` takes them."""

from __future__ import annotations

from collections.abc import Collection

from headrace.jobs.formats.file_format import format_of
from headrace.jobs.formats.identity import SourceIdentity, what_changed
from headrace.jobs.formats.sinks import Sink, open_sink
from headrace.jobs.formats.source import Source

__all__ = ["Sink", "Source", "SourceIdentity", "open_sink", "open_source", "what_changed"]


def open_source(path: str, *, format: str | None = None, json_columns: Collection[str] = ()) -> Source:
    """`format` is for names that do not say; `json_columns` of CSV are read as JSON, not as text."""
    wanted = format_of(path, format)
    if wanted.kind == "parquet":
        from headrace.jobs.formats.parquet import ParquetRows

        return ParquetRows(path)
    if wanted.kind == "jsonl":
        from headrace.jobs.formats.jsonl import JsonLines

        return JsonLines(path, wanted.compression)
    from headrace.jobs.formats.csv_rows import CsvRows

    return CsvRows(path, wanted, json_columns=json_columns)
