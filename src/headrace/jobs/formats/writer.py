"""Writes whole lines to an output file, in the order in which they come."""

from __future__ import annotations

import errno
import os
from io import FileIO
from types import TracebackType
from typing import Any, Protocol

from headrace.errors import JobError
from headrace.jobs.formats.locations import STANDARD_STREAM


class Results(Protocol):
    """Where a job's results go: into a stream, or into a job directory (`store.directory.JobDirectory`)."""

    def append(self, index: int, result: bytes, *, error: str | None = None) -> bool: ...

    def flush(self) -> None: ...

    @property
    def seconds_to_flush(self) -> float | None:
        """Seconds until `flush` must be called; None: no need."""
        ...

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes that `flush` has not written yet."""
        ...


class ByteWriter(Protocol):
    def write(self, data: Any, /) -> int | None: ...

    def close(self) -> None: ...


class LineSink(Protocol):
    def append(self, line: bytes) -> None: ...

    def flush(self) -> None: ...


class StreamResults:
    """Passes results to a sink and keeps nothing of them."""

    seconds_to_flush: float | None = None  # the job flushes before it waits
    num_buffered_bytes = 0  # a stream that cannot be written is an error at once

    def __init__(self, sink: LineSink) -> None:
        self._sink = sink

    def append(self, index: int, result: bytes, *, error: str | None = None) -> bool:
        self._sink.append(result)
        return True

    def flush(self) -> None:
        self._sink.flush()


class ResultWriter:
    """Owns the output file. Lines are buffered until `flush`, which writes them if they have `min_bytes` together."""

    def __init__(self, file: ByteWriter, name: str, *, min_bytes: int = 0) -> None:
        self._file = file
        self._name = name
        self._min_bytes = min_bytes
        self._buffered: list[bytes] = []
        self._num_buffered_bytes = 0
        self.num_written = 0

    @classmethod
    def open(cls, path: str, *, overwrite: bool = False) -> ResultWriter:
        """Creates a file, or with `overwrite` truncates it; a device or pipe is only opened."""
        try:
            return cls(create(path, overwrite=overwrite), shown_name(path))
        except OSError as error:
            raise JobError(f"the output {path} cannot be written: {error.strerror}") from error

    def append(self, line: bytes) -> None:
        self._buffered.append(line)
        self._num_buffered_bytes += len(line)

    def flush(self) -> None:
        if self._buffered and self._num_buffered_bytes >= self._min_bytes:
            self._write()

    def _write(self) -> None:
        data = memoryview(b"\n".join([*self._buffered, b""]))
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError as error:
            raise self._failure(error) from error
        self.num_written += len(self._buffered)
        self._num_buffered_bytes = 0
        self._buffered.clear()

    def close(self) -> None:
        try:
            if self._buffered:
                self._write()
        finally:
            self._buffered.clear()
            self._end()

    def _end(self) -> None:
        """Close the file. That may write: a compressed file has a trailer."""
        try:
            self._file.close()
        except OSError as error:
            raise self._failure(error) from error

    def __enter__(self) -> ResultWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _failure(self, error: OSError) -> JobError:
        self._buffered.clear()
        reason = "its reader has closed the pipe" if error.errno == errno.EPIPE else error.strerror
        return JobError(f"cannot write to {self._name}: {reason}; {self.num_written:,} lines were written before")


def shown_name(path: str) -> str:
    return "stdout" if path == STANDARD_STREAM else path


def create(path: str, *, overwrite: bool) -> FileIO:
    """Creates a file, or with `overwrite` truncates it; a device or pipe is only opened."""
    if path == STANDARD_STREAM:
        return FileIO(1, "w", closefd=False)
    try:
        return FileIO(path, "x")
    except FileExistsError:
        if os.path.isfile(path) and not overwrite:
            raise
        return FileIO(path, "w")
