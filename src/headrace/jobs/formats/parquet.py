"""Parquet, read in batches of rows. Nested columns become nested JSON; times, decimals and bytes become text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from headrace.errors import JobError
from headrace.jobs.formats import locations
from headrace.jobs.formats.identity import SourceIdentity, identify
from headrace.jobs.formats.locations import ByteReader
from headrace.jobs.formats.reader import InputLine, in_batches
from headrace.jobs.formats.source import Skip
from headrace.jobs.formats.table import check_columns

BATCH_ROWS = 1024


class ParquetRows:
    """A row's offset is its index, since rows have no byte offset."""

    is_appendable = False  # the metadata is at the end of the file

    def __init__(self, name: str) -> None:
        if not locations.can_be_read_again(name):
            raise JobError(f"{name} is a stream: Parquet can only be read from a file")
        self.name = name
        arrow = pyarrow()
        self._stored: ByteReader = locations.open_bytes(name)
        try:
            self._file = _open(self._stored, name, arrow)
            self.columns: tuple[str, ...] | None = check_columns(self._file.schema_arrow.names, name)
        except JobError:
            self._stored.close()
            raise
        self._encode = msgspec.json.Encoder().encode

    def identity(self, size: int | None = None) -> SourceIdentity | None:
        return identify(self.name, size)

    def read_batches(
        self, *, start: int = 0, limit: int | None = None, skip: Skip | None = None
    ) -> Iterator[list[InputLine]]:
        return in_batches(self._pieces(start), start=start, limit=limit, skip=skip)

    def estimate_num_lines(self) -> int | None:
        return int(self._file.metadata.num_rows)

    def close(self) -> None:
        self._file.close()
        self._stored.close()

    def _pieces(self, start: int) -> Iterator[list[InputLine]]:
        group, first = self._group_of(start)
        return self._read(list(range(group, self._file.num_row_groups)), first)

    def _read(self, groups: list[int], first: int) -> Iterator[list[InputLine]]:
        if not groups:
            return
        index = first
        try:
            for batch in self._file.iter_batches(batch_size=BATCH_ROWS, row_groups=groups):
                rows = _rows_of(batch)
                yield [self._line(place, row) for place, row in enumerate(rows, index)]
                index += len(rows)
        except (OSError, ValueError) as error:
            raise JobError(f"{self.name} cannot be read past row {index:,}: {error}") from error

    def _line(self, index: int, row: dict[str, Any]) -> InputLine:
        try:
            return InputLine(index, index, self._encode(row))
        except (TypeError, ValueError, UnicodeError) as error:
            return InputLine(index, index, b"", problem=f"the row cannot be converted to JSON: {error}")

    def _group_of(self, index: int) -> tuple[int, int]:
        """The row group of a row, and the index of the group's first row; past the end, the number of groups."""
        first = 0
        for group in range(self._file.num_row_groups):
            num_rows = self._file.metadata.row_group(group).num_rows
            if index < first + num_rows:
                return group, first
            first += num_rows
        return self._file.num_row_groups, first


def _rows_of(batch: Any) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
        return rows
    except (ValueError, OverflowError):  # a time that Python's types do not have
        columns = [[_value_of(scalar) for scalar in column] for column in batch.columns]
        names = batch.schema.names
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _value_of(scalar: Any) -> Any:
    """Times with nanoseconds, or beyond the year 9999, become text like other times."""
    from pyarrow import types

    try:
        return scalar.as_py()
    except (ValueError, OverflowError):
        kind = scalar.type
        if types.is_struct(kind):
            return {name: _value_of(value) for name, value in scalar.items()}
        if types.is_map(kind):
            return [[*_value_of(entry).values()] for entry in scalar.values]
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            return [_value_of(value) for value in scalar.values]
        return _time_text(scalar)


def _time_text(scalar: Any) -> str:
    from pyarrow import string, types

    if types.is_duration(scalar.type):
        per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[scalar.type.unit]
        seconds, rest = divmod(abs(scalar.value), per_second)
        fraction = f".{rest * (10**9 // per_second):09}" if rest else ""
        return f"{'-' if scalar.value < 0 else ''}PT{seconds}{fraction}S"
    text: str = scalar.cast(string()).as_py()
    return text.replace(" ", "T", 1)


def pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise JobError("Parquet needs pyarrow: pip install 'headrace[files]'") from None
    return pyarrow


def _open(stored: ByteReader, name: str, arrow: Any) -> Any:
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(stored)
    except (OSError, arrow.ArrowInvalid) as error:
        raise JobError(f"{name} is not a readable Parquet file: {error}") from error
