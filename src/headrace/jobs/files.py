"""Files that are whole or not there, whatever happens to the machine."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from headrace.jobs import crash_points

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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


def sync_directory(path: Path) -> None:
    """Names in it are durable after this."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
