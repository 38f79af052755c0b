"""Waits for space on a full disk. Meanwhile no new line starts, finished results stay in memory, and writes are tried
again. When the time limit or the memory limit is reached, the job stops and can be resumed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from headrace.errors import NoRoomError
from headrace.jobs.formats.writer import Results

TRY_SECONDS = 2.0
MAX_HELD_BYTES = 256 << 20


class DiskWait:
    """Owned by the job's main loop: all flushes of its results go through here."""

    def __init__(
        self,
        wait_s: float,
        *,
        directory: Path | None,
        tell: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wait_s = wait_s
        self._directory = directory
        self._tell = tell
        self._clock = clock
        self._full_since = 0.0
        self._try_at = 0.0
        self.num_needed_bytes = 0
        self.is_full = False

    def flush(self, results: Results) -> None:
        if self.is_full and self._clock() < self._try_at:
            self._limit_held_bytes(results)
            return
        try:
            results.flush()
        except NoRoomError as error:
            self._pause(error, results)
        else:
            if self.is_full:
                self._tell("the disk has space again; continuing")
            self.is_full = False

    @property
    def seconds_to_try(self) -> float:
        return max(0.0, self._try_at - self._clock())

    @property
    def reason(self) -> str:
        """A text for the user, while the disk is full."""
        free = free_bytes(self._directory)
        available = "" if free is None else f", {free:,} bytes are free"
        return f"the disk is full: {self.num_needed_bytes:,} bytes wait to be written{available}"

    def _pause(self, error: NoRoomError, results: Results) -> None:
        if not self.is_full:
            self._full_since = self._clock()
        left_s = self._full_since + self._wait_s - self._clock()
        if left_s <= 0:
            raise error
        was_full, self.is_full = self.is_full, True
        self._try_at = self._clock() + min(TRY_SECONDS, left_s)
        self._limit_held_bytes(results)
        if not was_full:
            self._tell(f"paused, {self.reason}; waiting for space for at most {self._wait_s:,.0f} s")

    def _limit_held_bytes(self, results: Results) -> None:
        self.num_needed_bytes = results.num_buffered_bytes
        if self.num_needed_bytes > MAX_HELD_BYTES:
            raise NoRoomError(
                f"the disk is full, and the {self.num_needed_bytes:,} bytes of results that wait for it are more "
                f"than the {MAX_HELD_BYTES:,} that are kept in memory: they are dropped and will be computed "
                "again; free some space, then run the same command again to continue"
            )


def retry_on_full_disk(action: Callable[[], None], *, wait_s: float, tell: Callable[[str], None]) -> None:
    """Run `action`, again and again while the disk is full, for at most `wait_s`."""
    until, has_told = time.monotonic() + wait_s, False
    while True:
        try:
            action()
            return
        except NoRoomError as error:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise
            if not has_told:
                tell(f"paused: {error}; waiting for at most {wait_s:,.0f} s")
            has_told = True
        time.sleep(min(TRY_SECONDS, left_s))


def free_bytes(path: Path | None) -> int | None:
    if path is None:
        return None
    try:
        found = os.statvfs(path)
    except (OSError, AttributeError):
        return None
    return found.f_bavail * found.f_frsize
