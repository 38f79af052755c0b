"""Which rows were in flight, for the case that the engine takes the whole process with it: `OUTPUT.job/in-flight`.

It is overwritten before each round of submissions with one write of a few kilobytes, which is never synced: it has to
survive the process, not the machine. A machine that was started again since is no engine's fault.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from zlib import crc32

IN_FLIGHT_NAME = "in-flight"

_HEAD = struct.Struct("<4sI16sQQ")  # magic, checksum of all that follows, boot, epoch, number of rows
_MAGIC = b"HRIF"


class InFlightFile:
    """Owned by the process that runs the job. What cannot be written is not known later, and stops nothing."""

    def __init__(self, path: Path | None, *, epoch: int = 1) -> None:
        self._epoch = epoch
        self._is_empty = False
        self._descriptor: int | None = None
        if path is not None:
            try:
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError:
                pass
        self.write(())

    def write(self, rows: Collection[int]) -> None:
        if self._descriptor is None or (not rows and self._is_empty):
            return
        self._is_empty = not rows
        body = struct.pack(f"<16sQQ{len(rows)}Q", _boot(), self._epoch, len(rows), *rows)
        try:
            os.pwrite(self._descriptor, _MAGIC + struct.pack("<I", crc32(body)) + body, 0)
        except OSError:
            pass

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def rows_in_flight(path: Path, *, epoch: int) -> list[int] | None:
    """When the process of that epoch ended; None: not known, or its machine ended too."""
    try:
        data = path.read_bytes()
        magic, checksum, boot, found, num_rows = _HEAD.unpack_from(data)
        rows = struct.unpack_from(f"<{num_rows}Q", data, _HEAD.size)
    except (OSError, struct.error, MemoryError, OverflowError):
        return None
    is_whole = magic == _MAGIC and crc32(data[8 : _HEAD.size + 8 * num_rows]) == checksum
    return list(rows) if is_whole and (boot, found) == (_boot(), epoch) else None


@lru_cache(1)
def _boot() -> bytes:
    """Tells one start of the machine from another, where the system has a name for it."""
    try:
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)
