"""JSON lines: a local file, an object in a store or a stream, compressed or not."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.errors import JobError
from headrace.jobs.formats import locations
from headrace.jobs.formats.compression import decompressed
from headrace.jobs.formats.file_format import Compression
from headrace.jobs.formats.identity import SourceIdentity, identify
from headrace.jobs.formats.line_index import LineOffsets
from headrace.jobs.formats.locations import ByteReader
from headrace.jobs.formats.reader import CHUNK_BYTES, MAX_LINE_BYTES, InputLine, LineSplitter, read_batches
from headrace.jobs.formats.source import Skip

ESTIMATE_BYTES = 16 * 1024 * 1024


class JsonLines:
    """Owns its open files. A second reading starts at the beginning; that of a pipe continues where the first ended."""

    def __init__(self, name: str, compression: Compression | None = None) -> None:
        self.name = name
        self.columns: tuple[str, ...] | None = None
        self._compression = compression
        self._opened: list[ByteReader] = [self._open()]
        self._is_stream = not locations.can_be_read_again(name)
        self._is_fresh = True
        self._offsets: LineOffsets | None = None

    @property
    def is_appendable(self) -> bool:
        return self._compression is None and not self._is_stream and not locations.is_url(self.name)

    def identity(self, size: int | None = None) -> SourceIdentity | None:
        return None if self._is_stream else identify(self.name, size)

    def read_batches(
        self, *, start: int = 0, limit: int | None = None, skip: Skip | None = None
    ) -> Iterator[list[InputLine]]:
        return read_batches(self._stream(), start=start, limit=limit, skip=skip)

    def line_at(self, index: int) -> InputLine | None:
        """The first call reads the whole file once, to learn where lines start."""
        if self._is_stream or self._compression:
            raise JobError(f"{self.name} can only be read from the start; give an uncompressed file")
        offsets = self._learn_offsets()
        span = offsets.span(index)
        if span is None:
            return None
        begin, end = span
        file = self._opened[0]
        file.seek(begin)
        lines = [line for piece in LineSplitter(_Part(file, end - begin), keep_blank=True) for line in piece]
        (line,) = lines
        data = line.data.removeprefix(b"\xef\xbb\xbf") if begin == 0 else line.data
        return InputLine(index, begin, data, end - begin > MAX_LINE_BYTES + 1)

    def estimate_num_lines(self) -> int | None:
        """How many lines are not blank: exact for a small file, None for a stream."""
        if self._is_stream:
            return None
        file = self._open()
        try:
            num_lines = num_bytes = 0
            for lines in LineSplitter(decompressed(file, self._compression, self.name)):
                num_lines += len(lines)
                num_bytes = lines[-1].offset + len(lines[-1].data) + 1 if lines else num_bytes
                if num_bytes >= ESTIMATE_BYTES:
                    return self._scaled(num_lines, num_bytes)
        except JobError:
            return None  # truncated: the job reports it
        finally:
            file.close()
        return num_lines

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()

    def _scaled(self, num_lines: int, num_bytes: int) -> int | None:
        whole = locations.num_bytes(self.name)
        return None if self._compression else max(num_lines, num_lines * whole // num_bytes)

    def _stream(self) -> ByteReader:
        if not self._is_fresh and not self._is_stream:
            self._opened.append(self._open())
        self._is_fresh = False
        return decompressed(self._opened[-1], self._compression, self.name)

    def _open(self) -> ByteReader:
        return locations.open_bytes(self.name)

    def _learn_offsets(self) -> LineOffsets:
        if self._offsets is None:
            self._is_fresh = False
            if len(self._opened) == 1:
                self._opened.insert(0, self._open())
            offsets = LineOffsets()
            while chunk := self._opened[0].read(CHUNK_BYTES):
                offsets.take(chunk)
            self._offsets = offsets
        return self._offsets


class _Part:
    """The next `size` bytes of a file."""

    def __init__(self, file: ByteReader, size: int) -> None:
        self._file = file
        self._left = size

    def read(self, size: int) -> bytes:
        data = self._file.read(min(size, self._left)) or b""
        self._left -= len(data)
        return data
