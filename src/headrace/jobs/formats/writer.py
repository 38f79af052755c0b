"""The output: whole lines, appended as they come. Knows nothing of engines or requests."""

from __future__ import annotations

import errno
import os
from io import FileIO
from types import TracebackType
from typing import Any, Protocol

from headrace.errors import JobError
from headrace.jobs.formats.locations import STANDARD_STREAM


class Results(Protocol):
    """Where a job's results go: into a stream, or into a job that survives (`JobDirectory`)."""

    def append(self, index: int, result: bytes, *, error: str | None = None) -> bool: ...

    def flush(self) -> None: ...

    @property
    def seconds_to_flush(self) -> float | None:
        """When `flush` should be called next, whatever else happens; None: no need."""
        ...

    @property
    def num_gathered_bytes(self) -> int:
        """That `flush` has still to write."""
        ...


class ByteWriter(Protocol):
    def write(self, data: Any, /) -> int | None: ...

    def close(self) -> None: ...


class LineSink(Protocol):
    def append(self, line: bytes) -> None: ...

    def flush(self) -> None: ...


class StreamResults:
    """Results go into a sink as they come, and nothing is kept of them."""

    seconds_to_flush: float | None = None  # whoever appends flushes before he waits
    num_gathered_bytes = 0  # a stream without room is an error

    def __init__(self, sink: LineSink) -> None:
        self._sink = sink

    def append(self, index: int, result: bytes, *, error: str | None = None) -> bool:
        self._sink.append(result)
        return True

    def flush(self) -> None:
        self._sink.flush()


class ResultWriter:
    """Owns the output file. Lines are gathered and go out together, at the end of an engine's step, or from
    `least_bytes` on."""

    def __init__(self, file: ByteWriter, name: str, *, least_bytes: int = 0) -> None:
        self._file = file
        self._name = name
        self._least_bytes = least_bytes
        self._gathered: list[bytes] = []
        self._num_gathered_bytes = 0
        self.num_written = 0

    @classmethod
    def open(cls, path: str, *, overwrite: bool = False) -> ResultWriter:
        """A new file, or with `overwrite` an emptied one; a device or pipe is only opened."""
        try:
            return cls(create(path, overwrite=overwrite), shown_name(path))
        except OSError as error:
            raise JobError(f"the output {path} cannot be written: {error.strerror}") from error

    def append(self, line: bytes) -> None:
        self._gathered.append(line)
        self._num_gathered_bytes += len(line)

    def flush(self) -> None:
        if self._gathered and self._num_gathered_bytes >= self._least_bytes:
            self._write()

    def _write(self) -> None:
        data = memoryview(b"\n".join([*self._gathered, b""]))
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError as error:
            raise self._failure(error) from error
        self.num_written += len(self._gathered)
        self._num_gathered_bytes = 0
        self._gathered.clear()

    def close(self) -> None:
        try:
            if self._gathered:
                self._write()
        finally:
            self._gathered.clear()
            self._end()

    def _end(self) -> None:
        """Closing may write: a compressed file has an end of its own."""
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
        self._gathered.clear()
        reason = "its reader has gone" if error.errno == errno.EPIPE else error.strerror
        return JobError(f"cannot write to {self._name}: {reason}; {self.num_written:,} lines were written before")


def shown_name(path: str) -> str:
    return "stdout" if path == STANDARD_STREAM else path


def create(path: str, *, overwrite: bool) -> FileIO:
    """A new file, or with `overwrite` an emptied one; a device or pipe is only opened."""
    if path == STANDARD_STREAM:
        return FileIO(1, "w", closefd=False)
    try:
        return FileIO(path, "x")
    except FileExistsError:
        if os.path.isfile(path) and not overwrite:
            raise
        return FileIO(path, "w")
