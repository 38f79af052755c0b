"""Writes output lines as a table. The first rows decide the columns. Later values that do not fit go, as JSON, into
the column `extra`: nothing is lost, and no late row can stop a job."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import msgspec

from headrace.errors import JobError, reason_of
from headrace.jobs.formats.parquet import pyarrow
from headrace.jobs.formats.writer import ByteWriter

GROUP_ROWS = 8192  # rows per write; the first group decides the columns
EXTRA = "extra"

Row = dict[str, Any]


class Table(Protocol):
    def begin(self, rows: Sequence[Row]) -> None:
        """Decide the columns. Called once, before `write`."""

    def write(self, rows: Sequence[Row]) -> None: ...

    def close(self) -> None: ...


class TableSink:
    """Collects rows and writes them in groups. The last, partial group is written by `close`."""

    def __init__(self, table: Table, name: str) -> None:
        self._table = table
        self._name = name
        self._rows: list[Row] = []
        self._has_begun = False
        self._decode = msgspec.json.Decoder(dict[str, Any]).decode
        self.num_written = 0

    def append(self, line: bytes) -> None:
        self._rows.append(self._decode(line))

    def flush(self) -> None:
        if len(self._rows) >= GROUP_ROWS:
            self._write()

    def close(self) -> None:
        try:
            self._write()
        finally:
            self._rows.clear()
            try:
                self._table.close()
            except OSError as error:
                raise self._failure(error) from error

    def __enter__(self) -> TableSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self) -> None:
        try:
            if not self._has_begun:
                self._has_begun = True
                self._table.begin(self._rows)
            if self._rows:
                self._table.write(self._rows)
        except OSError as error:
            raise self._failure(error) from error
        self.num_written += len(self._rows)
        self._rows.clear()

    def _failure(self, error: OSError) -> JobError:
        self._rows.clear()
        return JobError(
            f"cannot write to {self._name}: {reason_of(error)}; {self.num_written:,} lines were written before"
        )


def csv_table(file: ByteWriter, name: str, *, delimiter: str) -> TableSink:
    return TableSink(_CsvTable(file, delimiter), name)


def parquet_table(file: ByteWriter, name: str) -> TableSink:
    return TableSink(_ParquetTable(file), name)


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Returns the columns in the order of appearance, then those that only error lines have."""
    columns = dict.fromkeys(name for row in rows for name in row)
    if "custom_id" not in columns:
        columns |= dict.fromkeys(("index", "line"))
    columns |= dict.fromkeys(("error",))
    columns.pop(EXTRA, None)  # a field with this name goes into the column `extra` itself
    return [*columns, EXTRA]


def _extra(row: Row, known: Mapping[str, object], misfits: dict[str, Any]) -> str | None:
    more = {name: value for name, value in row.items() if name not in known or name == EXTRA} | misfits
    return _json(more) if more else None


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


class _CsvTable:
    """Text as it is, everything else as JSON; null is an empty cell."""

    def __init__(self, file: ByteWriter, delimiter: str) -> None:
        self._file = file
        self._delimiter = delimiter
        self._columns: dict[str, None] = {}

    def begin(self, rows: Sequence[Row]) -> None:
        self._columns = dict.fromkeys(columns_of(rows))
        self._write_cells([[*self._columns]])

    def write(self, rows: Sequence[Row]) -> None:
        *columns, _ = self._columns
        self._write_cells(
            [*(_cell(row.get(name)) for name in columns), _extra(row, self._columns, {}) or ""] for row in rows
        )

    def close(self) -> None:
        self._file.close()

    def _write_cells(self, rows: Any) -> None:
        text = io.StringIO()
        writer, quoting = (
            csv.writer(text, delimiter=self._delimiter, lineterminator="\n", quoting=quoting)
            for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL)
        )
        for row in rows:  # `writer` leaves a lone carriage return unquoted, which readers take for the end of a row
            (quoting if any("\r" in cell for cell in row) else writer).writerow(row)
        data = memoryview(text.getvalue().encode())
        while data:
            data = data[self._file.write(data) or 0 :]


def _cell(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else _json(value)


class _ParquetTable:
    """A column has the type of its values in the first group: numbers, text, booleans, or lists of these. Objects and
    mixed types are JSON text. `usage` and `error` are structs."""

    def __init__(self, file: ByteWriter) -> None:
        self._arrow = pyarrow()
        self._file = file
        self._types: dict[str, Any] = {}
        self._writer: Any = None

    def begin(self, rows: Sequence[Row]) -> None:
        from pyarrow import parquet

        self._types = {name: self._type(name, rows) for name in columns_of(rows)}
        self._writer = parquet.ParquetWriter(self._file, self._arrow.schema(self._types.items()), compression="zstd")

    def write(self, rows: Sequence[Row]) -> None:
        misfits: list[dict[str, Any]] = [{} for _ in rows]
        arrays = [self._array(name, kind, rows, misfits) for name, kind in self._types.items() if name != EXTRA]
        extra = [_extra(row, self._types, more) for row, more in zip(rows, misfits, strict=True)]
        arrays.append(self._arrow.array(extra, self._types[EXTRA]))
        self._writer.write_table(self._arrow.table(arrays, self._writer.schema))

    def close(self) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            self._file.close()

    def _type(self, name: str, rows: Sequence[Row]) -> Any:
        arrow = self._arrow
        known = {
            "index": arrow.int64(),
            "line": arrow.int64(),
            "error": arrow.struct({key: arrow.string() for key in ("code", "message", "param")}),
            "usage": arrow.struct(
                {
                    **{key: arrow.int64() for key in ("prompt_tokens", "completion_tokens", "total_tokens")},
                    "prompt_tokens_details": arrow.struct({"cached_tokens": arrow.int64()}),
                }
            ),
        }
        if name in known:
            return known[name]
        try:
            kind = arrow.infer_type([row.get(name) for row in rows])
        except (arrow.ArrowInvalid, arrow.ArrowTypeError, OverflowError):
            return arrow.string()
        plain = kind.value_type if arrow.types.is_list(kind) else kind
        is_simple = any(
            test(plain)
            for test in (arrow.types.is_integer, arrow.types.is_floating, arrow.types.is_string, arrow.types.is_boolean)
        )
        return kind if is_simple else arrow.string()

    def _array(self, name: str, kind: Any, rows: Sequence[Row], misfits: list[dict[str, Any]]) -> Any:
        values = [row.get(name) for row in rows]
        if kind == self._arrow.string():
            values = [value if value is None or isinstance(value, str) else _json(value) for value in values]
        try:
            return self._arrow.array(values, kind)
        except (self._arrow.ArrowInvalid, self._arrow.ArrowTypeError, OverflowError):
            return self._arrow.array(self._fitting(name, kind, values, misfits), kind)

    def _fitting(self, name: str, kind: Any, values: list[Any], misfits: list[dict[str, Any]]) -> list[Any]:
        for place, value in enumerate(values):
            try:
                self._arrow.array([value], kind)
            except (self._arrow.ArrowInvalid, self._arrow.ArrowTypeError, OverflowError):
                misfits[place][name] = value
                values[place] = None
        return values
