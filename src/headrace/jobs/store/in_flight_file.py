"""The lines in flight, for the case that an engine kills the whole process: `OUTPUT.job/in-flight`.

It is overwritten before each round of submissions with one write of a few kilobytes, never synced: it must survive the
process, not the machine. After a reboot its contents are ignored, since no line is to blame for that.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from zlib import crc32

IN_FLIGHT_NAME = "in-flight"

_HEAD = struct.Struct("=4sI16sQQ")  # magic, checksum of everything after it, boot id, epoch, number of places
_BODY = struct.Struct("=16sQQ")
_MAGIC = b"HRIF"
_MAGIC_APART = b"HRIP"  # engines had processes of their own
_EMPTY = 0  # a place holds the index of a line plus one


class InFlightFile:
    """Owned by the process that runs the job. A failed write is ignored: it only loses information."""

    def __init__(self, path: Path | None, *, epoch: int = 1, have_processes: bool = False) -> None:
        """`have_processes`: engines run in processes of their own, so that no line can end this one."""
        self._magic = _MAGIC_APART if have_processes else _MAGIC
        self._epoch = epoch
        self._places = array("Q")
        self._place_of: dict[int, int] = {}  # by line
        self._free: list[int] = []
        self._descriptor: int | None = None
        if path is not None:
            try:
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError:
                pass
        self._write()

    def add(self, lines: Iterable[int]) -> None:
        """Call it before the lines are submitted."""
        if self._descriptor is None:
            return
        for line in lines:
            if line in self._place_of:
                continue
            if self._free:
                place = self._free.pop()
                self._places[place] = line + 1
            else:
                place = len(self._places)
                self._places.append(line + 1)
            self._place_of[line] = place
        self._write()

    def remove(self, line: int) -> None:
        """Remove a line. It stays in the file until lines are added; by then the journal has its result, which takes
        precedence."""
        place = self._place_of.pop(line, None)
        if place is not None:
            self._places[place] = _EMPTY
            self._free.append(place)

    def clear(self) -> None:
        self._places, self._place_of, self._free = array("Q"), {}, []
        self._write()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self) -> None:
        if self._descriptor is None:
            return
        body = _BODY.pack(boot_id(), self._epoch, len(self._places)) + self._places.tobytes()
        try:
            os.pwrite(self._descriptor, self._magic + struct.pack("=I", crc32(body)) + body, 0)
        except OSError:
            pass


def lines_in_flight(path: Path, *, epoch: int) -> list[int] | None:
    """Lines in flight when the process of that epoch ended; None: unknown, or the machine was rebooted since."""
    try:
        data = path.read_bytes()
        magic, checksum, boot, found, num_places = _HEAD.unpack_from(data)
        places = struct.unpack_from(f"={num_places}Q", data, _HEAD.size)
    except (OSError, struct.error, MemoryError, OverflowError):
        return None
    is_whole = magic in (_MAGIC, _MAGIC_APART) and crc32(data[8 : _HEAD.size + 8 * num_places]) == checksum
    if not is_whole or (boot, found) != (boot_id(), epoch):
        return None
    return [place - 1 for place in places if place != _EMPTY]


def had_processes(path: Path) -> bool:
    """Whether the engines of the run that wrote the file had processes of their own."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC_APART
    except OSError:
        return False


@lru_cache(1)
def boot_id() -> bytes:
    """Differs between boots of the machine; zeros where the system has no boot id."""
    try:
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)
