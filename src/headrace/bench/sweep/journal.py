"""The journal of a sweep or a search: one fsynced line for each measurement that ended, well or not.

Only one process writes it. `schema` says whose journal it is: a sweep does not read that of a search.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from headrace.bench.record import RecordError

SCHEMA = "headrace.sweep/1"
SUFFIX = ".journal"


class JournalError(RecordError):
    """The journal cannot be read or written. What it has is intact."""


class Journal:
    """`entries` are the lines of earlier runs and of this one. A line that was cut off by a crash is removed."""

    def __init__(self, path: Path, schema: str = SCHEMA) -> None:
        self.path = path
        self.schema = schema
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise JournalError(f"the journal {path} cannot be opened: {error.strerror}") from error
        try:
            self._lock()
            self.entries, self._end = self._read()
            os.ftruncate(self._file, self._end)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, entry: dict[str, Any]) -> None:
        """Write an entry so that it survives a crash of the machine. If that fails, nothing of it remains."""
        line = json.dumps({"schema": self.schema, **entry}).encode() + b"\n"
        try:
            self._write(line)
            os.fsync(self._file)
        except OSError as error:
            try:
                os.ftruncate(self._file, self._end)
            except OSError:
                pass  # the next start removes the rest of the line
            raise JournalError(f"the journal {self.path} cannot be written: {error.strerror}") from error
        self._end += len(line)
        self.entries.append(entry)

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, line: bytes) -> None:
        written = 0
        while written < len(line):
            written += os.pwrite(self._file, line[written:], self._end + written)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise JournalError(
                f"another sweep or search is writing {self.path}; wait for it, or give another output"
            ) from None

    def _read(self) -> tuple[list[dict[str, Any]], int]:
        """The entries, and where the last whole line ends."""
        data = self.path.read_bytes()
        end = data.rfind(b"\n") + 1
        entries = []
        for number, line in enumerate(data[:end].splitlines(), 1):
            try:
                entry = json.loads(line)
            except ValueError:
                entry = None
            if not isinstance(entry, dict) or entry.get("schema") != self.schema:
                raise JournalError(
                    f"{self.path}, line {number}: no entry of such a journal ({self.schema}); move the file away"
                )
            entries.append(entry)
        return entries, end
