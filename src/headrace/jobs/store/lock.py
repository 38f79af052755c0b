"""One process per job: an flock, which the system releases with its holder, and a note of who holds it."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.errors import JobError

# `headrace status` holds a shared lock for a moment; a job that starts at that time tries again.
NUM_TRIES = 5
TRY_SECONDS = 0.05


@dataclass(frozen=True)
class Holder:
    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class JobLock:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: Path) -> JobLock:
        """Raises an error that names the holder if another process has the lock."""
        for number in range(NUM_TRIES):
            descriptor = _try(path, fcntl.LOCK_EX)
            if descriptor is not None:
                lock = cls(descriptor)
                lock._sign()
                return lock
            if number < NUM_TRIES - 1:
                time.sleep(TRY_SECONDS)
        raise JobError(
            f"the job in {path.parent} is running already: {_read(path) or 'by an unknown process'}; "
            f"see 'headrace status {path.parent}', or stop it with 'headrace cancel {path.parent}'"
        )

    def release(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def _sign(self) -> None:
        holder = Holder(os.getpid(), socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S"))
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, msgspec.json.encode(holder), 0)


def holder_of(path: Path) -> Holder | None:
    """The process that runs the job now; None if there is none."""
    if not path.exists():
        return None
    descriptor = _try(path, fcntl.LOCK_SH)
    if descriptor is None:
        return _read(path) or Holder(0, "an unknown host", "an unknown time")
    os.close(descriptor)
    return None


def _try(path: Path, kind: int) -> int | None:
    """An open descriptor with the lock, or None if another process has it."""
    mode = os.O_RDWR | os.O_CREAT if kind == fcntl.LOCK_EX else os.O_RDONLY
    descriptor = os.open(path, mode | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        if path.exists() and _is_same(descriptor, path):
            return descriptor
    except BlockingIOError:
        pass
    except OSError as error:
        os.close(descriptor)
        raise JobError(
            f"the job's lock {path} cannot be taken: {error.strerror}; put the output on a file system with locks"
        ) from error
    os.close(descriptor)
    return None


def _is_same(descriptor: int, path: Path) -> bool:
    """Returns False if the file was removed or replaced between `open` and `flock`."""
    opened, named = os.fstat(descriptor), os.stat(path)
    return (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino)


def _read(path: Path) -> Holder | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Holder)
    except (OSError, msgspec.MsgspecError):
        return None
