"""Files that are whole or not there, whatever happens to the machine."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from headrace.errors import JobError, NoRoomError
from headrace.jobs import crash_points

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_atomically(path: Path, data: bytes) -> None:
    """The old file or the new one, never a part: temporary file, fsync, rename, fsync of the directory."""
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
    """Without the times of the file, where the system can do that."""
    getattr(os, "fdatasync", os.fsync)(descriptor)


def sync_directory(path: Path) -> None:
    """Names in it are durable after this."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_no_room(error: OSError) -> bool:
    return error.errno in _NO_ROOM


def job_error(message: str, error: OSError) -> JobError:
    """`message` says what is kept; a full disk can be helped, and then the job goes on."""
    if is_no_room(error):
        return NoRoomError(f"{message}; make room, and the same command goes on from there")
    return JobError(message)
