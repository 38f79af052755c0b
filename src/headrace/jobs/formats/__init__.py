"""Files of every kind as lines: `open_source` reads lines, `open_sink` writes them.

    name ─▶ file_format.format_of     kind and compression: `rows.csv.gz` is CSV, compressed with gzip
         ─▶ locations                 a local path, '-' (stdin, stdout), or a URL that fsspec knows
         ─▶ compression               gzip and zstd as streams

    reader                            a byte stream as lines; line_index: sets of lines in little memory
    sources   jsonl, csv_rows, parquet                    source.Source: what all have in common
    sinks     writer (lines), table_sinks (CSV, Parquet), object_store (segments)     sinks.Sink

- A source yields `InputLine`s with an index and an offset. A row of a table is the JSON of an object, so no other
  package knows formats.
- A source can leave out lines that are done, before they are parsed (`skip`).
- A source has an identity (size and one hash per 16 MiB), which distinguishes edited lines from added ones.
- No source holds a whole file: one chunk or one batch of rows at a time.
"""

from __future__ import annotations

from collections.abc import Collection

from headrace.jobs.formats.file_format import format_of
from headrace.jobs.formats.identity import SourceIdentity, what_changed
from headrace.jobs.formats.sinks import Sink, open_sink
from headrace.jobs.formats.source import Source

__all__ = ["Sink", "Source", "SourceIdentity", "open_sink", "open_source", "what_changed"]


def open_source(path: str, *, format: str | None = None, json_columns: Collection[str] = ()) -> Source:
    """`format` overrides the file name; `json_columns` of CSV are read as JSON, not as text."""
    wanted = format_of(path, format)
    if wanted.kind == "parquet":
        from headrace.jobs.formats.parquet import ParquetRows

        return ParquetRows(path)
    if wanted.kind == "jsonl":
        from headrace.jobs.formats.jsonl import JsonLines

        return JsonLines(path, wanted.compression)
    from headrace.jobs.formats.csv_rows import CsvRows

    return CsvRows(path, wanted, json_columns=json_columns)
