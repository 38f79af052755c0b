"""CSV and TSV with a header, read as a stream. A row may span several lines; each cell is text."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from headrace.errors import JobError
from headrace.jobs.formats import locations
from headrace.jobs.formats.compression import decompressed
from headrace.jobs.formats.file_format import Format
from headrace.jobs.formats.identity import SourceIdentity, identify
from headrace.jobs.formats.reader import MAX_LINE_BYTES, InputLine, LineSplitter, in_batches
from headrace.jobs.formats.source import Skip
from headrace.jobs.formats.table import check_columns

BATCH_ROWS = 256
ESTIMATE_BYTES = 16 * 1024 * 1024


class CsvRows:
    """Cells of `json_columns` that are not empty are read as JSON: '8' becomes a number."""

    def __init__(self, name: str, format: Format, *, json_columns: Collection[str] = ()) -> None:
        self.name = name
        self._format = format
        self._is_stream = not locations.can_be_read_again(name)
        self._first: _Reading | None = self._open()
        self._columns = self._first.columns
        self._json_columns = [column for column in self._columns if column in json_columns]

    @property
    def columns(self) -> tuple[str, ...] | None:
        return self._columns

    @property
    def is_appendable(self) -> bool:
        return self._format.compression is None and not self._is_stream and not locations.is_url(self.name)

    def identity(self, size: int | None = None) -> SourceIdentity | None:
        return None if self._is_stream else identify(self.name, size)

    def read_batches(
        self, *, start: int = 0, limit: int | None = None, skip: Skip | None = None
    ) -> Iterator[list[InputLine]]:
        reading, self._first = self._first, None
        if reading is None:
            if self._is_stream:
                raise JobError(f"{self.name} can be read only once")
            reading = self._open()
        return in_batches(self._rows(reading), start=start, limit=limit, skip=skip)

    def estimate_num_lines(self) -> int | None:
        if self._is_stream:
            return None
        reading = self._open()
        num_rows = 0
        try:
            for _, _, values in reading:
                num_rows += bool(values)
                if reading.offset >= ESTIMATE_BYTES:
                    whole = locations.num_bytes(self.name)
                    return None if self._format.compression else max(num_rows, num_rows * whole // reading.offset)
        except JobError:
            return None  # the job reports the reason
        finally:
            reading.close()
        return num_rows

    def close(self) -> None:
        if self._first is not None:
            self._first.close()

    def _open(self) -> _Reading:
        return _Reading(self.name, self._format)

    def _rows(self, reading: _Reading) -> Iterator[list[InputLine]]:
        encode = msgspec.json.Encoder().encode
        lines: list[InputLine] = []
        try:
            for index, offset, values in reading:
                if not isinstance(values, str) and not values:
                    continue
                lines.append(self._line(index, offset, values, encode))
                if len(lines) >= BATCH_ROWS or reading.must_wait:
                    yield lines
                    lines = []
        except JobError:  # the rows before it are complete
            yield lines
            raise
        else:
            yield lines
        finally:
            reading.close()

    def _line(self, index: int, offset: int, values: list[str] | str, encode: Any) -> InputLine:
        if isinstance(values, str):
            return InputLine(index, offset, b"", problem=values)
        if len(values) != len(self._columns):
            cells = "1 cell" if len(values) == 1 else f"{len(values)} cells"
            problem = f"{cells}, the header has {len(self._columns)}"
            return InputLine(index, offset, b"", problem=problem)
        row: dict[str, Any] = dict(zip(self._columns, values, strict=True))
        for column in self._json_columns:
            row[column] = _from_json(row[column])
        try:
            return InputLine(index, offset, encode(row))
        except UnicodeEncodeError:
            return InputLine(index, offset, b"", problem="invalid UTF-8")


class _Reading:
    """One pass over the file after its header. Yields (index, offset, cells); for a bad row, a message instead of
    cells."""

    def __init__(self, name: str, format: Format) -> None:
        csv.field_size_limit(MAX_LINE_BYTES)
        self._name = name
        self._stored = locations.open_bytes(name)
        try:
            self._lines = _TextLines(
                LineSplitter(decompressed(self._stored, format.compression, name), keep_blank=True)
            )
            self._rows = csv.reader(self._lines, delimiter="\t" if format.kind == "tsv" else ",", strict=True)
            self.columns = self._header()
        except JobError:
            self.close()
            raise

    @property
    def offset(self) -> int:
        return self._lines.offset

    @property
    def must_wait(self) -> bool:
        """Whether the next row needs bytes that were not read yet, which may block on a pipe."""
        return self._lines.must_wait

    def __iter__(self) -> Iterator[tuple[int, int, list[str] | str]]:
        index = 0
        while True:
            self._lines.row_offset = None
            try:
                values: list[str] | str = next(self._rows)
            except StopIteration:
                return
            except csv.Error as error:
                values = f"invalid CSV: {_explained(error, self._lines.row_number)}"
            yield index, self._lines.row_offset or 0, values
            index += 1

    def close(self) -> None:
        self._stored.close()

    def _header(self) -> tuple[str, ...]:
        try:
            header = next(self._rows, [])
        except csv.Error as error:
            raise JobError(f"the header of {self._name} cannot be read: {_explained(error, 1)}") from None
        try:
            "".join(header).encode()
        except UnicodeEncodeError:
            raise JobError(f"the header of {self._name} is not UTF-8; convert the file first") from None
        return check_columns(header, self._name)


class _TextLines:
    """Lines with their line breaks, for the csv module. Can continue after an error, unlike a generator."""

    def __init__(self, splitter: LineSplitter) -> None:
        self._pieces = iter(splitter)
        self._piece: list[InputLine] = []
        self._num_taken = 0  # of this piece
        self.offset = 0  # of the last line
        self.row_offset: int | None = None  # of the first line since the caller reset it to None
        self.row_number = 1  # the number of that line in the file
        self._number = 0  # of the last line

    @property
    def must_wait(self) -> bool:
        return self._num_taken >= len(self._piece)

    def __iter__(self) -> _TextLines:
        return self

    def __next__(self) -> str:
        while self.must_wait:
            self._piece, self._num_taken = next(self._pieces), 0
        line = self._piece[self._num_taken]
        self._num_taken += 1
        self.offset = line.offset
        self._number += 1
        if self.row_offset is None:
            self.row_offset = line.offset
            self.row_number = self._number
        if line.is_too_long:
            raise csv.Error(f"longer than {MAX_LINE_BYTES // 2**20} MiB")
        # Invalid UTF-8 passes here and is refused with its own row.
        return line.data.decode("utf-8", "surrogateescape") + "\n"


def _explained(error: csv.Error, row_number: int) -> str:
    """The csv module names no line, and calls a quote that is never closed an unexpected end of data."""
    if "unexpected end of data" in str(error):
        return f"a quote in the row that starts in line {row_number:,} of the file is not closed"
    return f"{error} in the row that starts in line {row_number:,} of the file"


def _from_json(cell: str) -> Any:
    if not cell:
        return None
    try:
        return msgspec.json.decode(cell.encode("utf-8", "surrogateescape"))
    except (msgspec.DecodeError, UnicodeError):
        return cell
