"""Splits a byte stream into lines, each with its index and offset. Holds one chunk, never the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import msgspec

from headrace.errors import JobError

BOM = b"\xef\xbb\xbf"
CHUNK_BYTES = 256 * 1024
BATCH_LINES = 256
MAX_LINE_BYTES = 64 * 1024 * 1024  # more text than any context holds


class ByteReader(Protocol):
    def read(self, size: int, /) -> bytes | None: ...


class InputLine(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A Struct because there are millions: it takes a third of the time of a dataclass."""

    index: int  # from 0, blank lines counted
    offset: int  # of its first byte in the decompressed file
    data: bytes  # without the line break
    is_too_long: bool = False  # then `data` is only its start
    problem: str | None = None  # why the source could not read it; then `data` is empty

    @property
    def number(self) -> int:
        """The line number, from 1."""
        return self.index + 1


def read_batches(
    source: ByteReader, *, start: int = 0, limit: int | None = None, skip: Callable[[int], bool] | None = None
) -> Iterator[list[InputLine]]:
    """Lists of up to BATCH_LINES lines, each as soon as it is read. Leaves out blank lines, lines before `start`, and
    lines for which `skip` is true; `limit` counts all lines from `start` that are not blank."""
    return in_batches(LineSplitter(source), start=start, limit=limit, skip=skip)


def in_batches(
    pieces: Iterable[list[InputLine]], *, start: int, limit: int | None, skip: Callable[[int], bool] | None
) -> Iterator[list[InputLine]]:
    left = limit
    for lines in pieces:
        if start:
            lines = [line for line in lines if line.index >= start]
        if left is not None:
            lines = lines[:left]
            left -= len(lines)
        if skip is not None:
            lines = [line for line in lines if not skip(line.index)]
        for begin in range(0, len(lines), BATCH_LINES):
            yield lines[begin : begin + BATCH_LINES]
        if left == 0:
            return


class LineSplitter:
    """Yields, for each chunk, the lines that end in it. Blank lines count for the index and are left out."""

    def __init__(self, source: ByteReader, *, keep_blank: bool = False) -> None:
        self._source = source
        self._keep_blank = keep_blank
        self._index = 0
        self._offset = 0
        self._begun: list[bytes] = []  # pieces of a line whose end was not read yet
        self._begun_len = 0
        self._dropped_len = 0  # bytes of a too long line that were dropped

    def __iter__(self) -> Iterator[list[InputLine]]:
        while chunk := self._read():
            yield self._lines_of(chunk)
        if self._begun_len or self._dropped_len:
            yield self._end_line(b"", break_len=0)

    def _read(self) -> bytes:
        try:
            return self._source.read(CHUNK_BYTES) or b""
        except OSError as error:
            raise JobError(f"the input cannot be read past byte {self._offset:,}: {error.strerror}") from error

    def _lines_of(self, chunk: bytes) -> list[InputLine]:
        first, *ends = chunk.split(b"\n")
        if not ends:
            self._keep(first)
            return []
        lines = self._end_line(first, break_len=1)
        rest = ends.pop()
        index, offset, keep_blank = self._index, self._offset, self._keep_blank
        for data in ends:
            num_bytes = len(data) + 1
            if data.endswith(b"\r"):
                data = data[:-1]
            if num_bytes > MAX_LINE_BYTES + 1:
                lines.append(InputLine(index, offset, data[:MAX_LINE_BYTES], True))
            elif keep_blank or not _is_blank(data):
                lines.append(InputLine(index, offset, data))
            index += 1
            offset += num_bytes
        self._index, self._offset = index, offset
        self._keep(rest)
        return lines

    def _keep(self, piece: bytes) -> None:
        if self._dropped_len or self._begun_len + len(piece) > MAX_LINE_BYTES:
            self._dropped_len += len(piece)
        elif piece:
            self._begun.append(piece)
            self._begun_len += len(piece)

    def _end_line(self, end: bytes, *, break_len: int) -> list[InputLine]:
        self._keep(end)
        data, is_too_long = b"".join(self._begun), bool(self._dropped_len)
        line = InputLine(self._index, self._offset, _cleaned(data, self._offset), is_too_long)
        self._index += 1
        self._offset += len(data) + self._dropped_len + break_len
        self._begun, self._begun_len, self._dropped_len = [], 0, 0
        return [line] if is_too_long or self._keep_blank or not _is_blank(line.data) else []


def _is_blank(data: bytes) -> bool:
    return not data or data.isspace()


def _cleaned(data: bytes, offset: int) -> bytes:
    return (data.removeprefix(BOM) if offset == 0 else data).removesuffix(b"\r")
