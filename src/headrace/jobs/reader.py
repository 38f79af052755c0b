"""The input as a stream of lines, each with its place in the file. Holds one chunk, never the file."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO

from headrace.errors import JobError
from headrace.jobs.spec import STANDARD_STREAM

BOM = b"\xef\xbb\xbf"
CHUNK_BYTES = 256 * 1024
BATCH_LINES = 64
MAX_LINE_BYTES = 64 * 1024 * 1024  # more text than any context holds
ESTIMATE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class InputLine:
    index: int  # from 0, blank lines counted
    offset: int  # of its first byte in the file
    data: bytes  # without the line break
    is_too_long: bool = False  # then `data` is only its beginning

    @property
    def number(self) -> int:
        """As editors count: from 1."""
        return self.index + 1


def open_input(path: str) -> FileIO:
    """Unbuffered: a read gives what is there, so that the lines of a slow pipe are not held back."""
    try:
        return FileIO(0, closefd=False) if path == STANDARD_STREAM else FileIO(path)
    except OSError as error:
        raise JobError(f"the input {path} cannot be read: {error.strerror}") from error


def read_batches(source: FileIO, *, limit: int | None = None) -> Iterator[list[InputLine]]:
    """Lines in lists of up to BATCH_LINES, each as soon as it can be read. Blank lines are left out."""
    left = limit
    for lines in _LineCutter(source):
        filled = [line for line in lines if line.data.strip()][:left]
        for start in range(0, len(filled), BATCH_LINES):
            yield filled[start : start + BATCH_LINES]
        if left is not None:
            left -= len(filled)
            if left == 0:
                return


def estimate_num_lines(path: str) -> int | None:
    """How many lines are not blank: exact for a file of up to ESTIMATE_BYTES, None for a pipe."""
    if path == STANDARD_STREAM or not stat.S_ISREG(os.stat(path).st_mode):
        return None
    num_lines = num_bytes = 0
    with open(path, "rb") as file:
        while num_bytes < ESTIMATE_BYTES and (line := file.readline(MAX_LINE_BYTES)):
            num_bytes += len(line)
            num_lines += bool(line.strip())
    size = os.stat(path).st_size
    return num_lines if num_bytes >= size else num_lines * size // max(1, num_bytes)


class _LineCutter:
    """Cuts a stream into lines: for each chunk read, the lines that it ends."""

    def __init__(self, source: FileIO) -> None:
        self._source = source
        self._index = 0
        self._offset = 0
        self._begun: list[bytes] = []  # pieces of a line whose end has not been read
        self._begun_len = 0
        self._dropped_len = 0  # bytes of an over-long line that were not kept

    def __iter__(self) -> Iterator[list[InputLine]]:
        while chunk := self._read():
            yield self._lines_of(chunk)
        if self._begun_len:
            yield [self._end_line(b"", break_len=0)]

    def _read(self) -> bytes:
        try:
            return self._source.read(CHUNK_BYTES) or b""
        except OSError as error:
            raise JobError(f"the input cannot be read past byte {self._offset:,}: {error.strerror}") from error

    def _lines_of(self, chunk: bytes) -> list[InputLine]:
        *ends, rest = chunk.split(b"\n")
        lines = [self._end_line(end, break_len=1) for end in ends]
        self._keep(rest)
        return lines

    def _keep(self, piece: bytes) -> None:
        if self._dropped_len or self._begun_len + len(piece) > MAX_LINE_BYTES:
            self._dropped_len += len(piece)
        elif piece:
            self._begun.append(piece)
            self._begun_len += len(piece)

    def _end_line(self, end: bytes, *, break_len: int) -> InputLine:
        self._keep(end)
        data = b"".join(self._begun)
        line = InputLine(self._index, self._offset, _cleaned(data, self._offset), bool(self._dropped_len))
        self._index += 1
        self._offset += len(data) + self._dropped_len + break_len
        self._begun, self._begun_len, self._dropped_len = [], 0, 0
        return line


def _cleaned(data: bytes, offset: int) -> bytes:
    return (data.removeprefix(BOM) if offset == 0 else data).removesuffix(b"\r")
