"""JSON lines: a local file, an object in a store or a stream, compressed or not."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.errors import JobError
from headrace.jobs.formats import locations
from headrace.jobs.formats.compression import decompressed
from headrace.jobs.formats.file_format import Compression
from headrace.jobs.formats.identity import SourceIdentity, identify
from headrace.jobs.formats.locations import ByteReader
from headrace.jobs.formats.reader import InputLine, LineSplitter, read_batches
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

    @property
    def is_appendable(self) -> bool:
        return self._compression is None and not self._is_stream and not locations.is_url(self.name)

    def identity(self, size: int | None = None) -> SourceIdentity | None:
        return None if self._is_stream else identify(self.name, size)

    def read_batches(
        self, *, start: int = 0, limit: int | None = None, skip: Skip | None = None
    ) -> Iterator[list[InputLine]]:
        return read_batches(self._stream(), start=start, limit=limit, skip=skip)

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
