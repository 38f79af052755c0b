"""Durable file operations: atomic replacement, fsync, and errors of a full disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from headrace.errors import JobError, NoRoomError
from headrace.jobs import crash_points

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_atomically(path: Path, data: bytes) -> None:
    """Readers see the old file or the new one, never a part: temporary file, fsync, rename, fsync of the directory."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    crash_points.reach("manifest-written")
    os.replace(temporary, path)
    sync_directory(path.parent)
    crash_points.reach("manifest-renamed")


def sync_data(descriptor: int) -> None:
    """fdatasync where the system has it: the file's timestamps are not synced."""
    getattr(os, "fdatasync", os.fsync)(descriptor)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_no_room(error: OSError) -> bool:
    return error.errno in _NO_ROOM


def job_error(message: str, error: OSError) -> JobError:
    """`message` says which results are kept. On a full disk the error is resumable."""
    if is_no_room(error):
        return NoRoomError(f"{message}; make room, then run the same command again to continue")
    return JobError(message)
