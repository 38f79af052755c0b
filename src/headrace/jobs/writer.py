"""The output: whole lines, appended as they come. Knows nothing of engines or requests."""

from __future__ import annotations

import errno
import os
from io import FileIO
from types import TracebackType
from typing import Protocol

from headrace.errors import JobError
from headrace.jobs.spec import STANDARD_STREAM


class Results(Protocol):
    """Where a job's results go: a stream (`ResultWriter`), or a job that survives (`JobDirectory`)."""

    def append(self, index: int, result: bytes, *, error: str | None = None) -> bool: ...

    def flush(self) -> None: ...

    @property
    def seconds_to_flush(self) -> float | None:
        """When `flush` should be called next, whatever else happens; None: no need."""
        ...


class ResultWriter:
    """Owns the output file. Lines are gathered and go out together, at the end of an engine's step."""

    def __init__(self, file: FileIO, name: str) -> None:
        self._file = file
        self._name = name
        self._gathered: list[bytes] = []
        self.num_written = 0

    @classmethod
    def open(cls, path: str, *, overwrite: bool = False) -> ResultWriter:
        """A new file, or with `overwrite` an emptied one; a device or pipe is only opened."""
        try:
            if path == STANDARD_STREAM:
                return cls(FileIO(1, "w", closefd=False), "stdout")
            return cls(_create(path, overwrite=overwrite), path)
        except OSError as error:
            raise JobError(f"the output {path} cannot be written: {error.strerror}") from error

    def append(self, index: int, result: bytes, *, error: str | None = None) -> bool:
        self._gathered.append(result)
        return True

    @property
    def seconds_to_flush(self) -> float | None:
        """Nothing is ever left to be flushed later."""
        return 0.0 if self._gathered else None

    def flush(self) -> None:
        if not self._gathered:
            return
        data = memoryview(b"\n".join([*self._gathered, b""]))
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError as error:
            raise self._failure(error) from error
        self.num_written += len(self._gathered)
        self._gathered.clear()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._gathered.clear()
            self._file.close()

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


def _create(path: str, *, overwrite: bool) -> FileIO:
    try:
        return FileIO(path, "x")
    except FileExistsError:
        if os.path.isfile(path) and not overwrite:
            raise
        return FileIO(path, "w")
