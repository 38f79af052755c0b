"""Shows the stages of an engine's start: a live line on a terminal, and a line for each finished stage."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TextIO

from headrace.startup import StartupStage, ready_line

_ERASE_LINE = "\r\x1b[2K"
_package_log = logging.getLogger("headrace")
_log = logging.getLogger(__name__)


class StartupDisplay:
    """The `report` of a start. Inside its `with`, the stage that runs is shown on `terminal`, if there is one. `tell`
    prints a line for each stage that has ended, once the next one begins: a setting that is refused after torch was
    imported is an error of one line. After the `with`, stages are those of a restarted engine.

    A terminal that has gone, or a closed stream, never ends a start. Any thread may report."""

    def __init__(self, tell: Callable[[str], None], *, terminal: TextIO | None = None) -> None:
        self._tell = tell
        self._terminal = terminal
        self._is_line_shown = False
        self._is_restart = False
        self._held: str | None = None  # the line of the stage that has just ended
        self._lock = threading.Lock()

    def __enter__(self) -> StartupDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._erase()
            if error is None:
                self._tell_held()
            self._terminal, self._is_restart, self._held = None, True, None

    def __call__(self, stage: StartupStage) -> None:
        with self._lock:
            self._erase()
            self._tell_held()
            if stage.is_finished and self._is_restart:
                self._tell_safely(f"engine restart: {stage}")
            elif stage.is_finished:
                self._held = str(stage)
            elif self._terminal is not None:
                self._write(f"headrace: {stage}"[: _num_columns() - 1])
                self._is_line_shown = self._terminal is not None

    def ready(self, seconds: float, stages: Iterable[StartupStage]) -> None:
        """Print how long the start and its stages took."""
        with self._lock:
            self._erase()
            self._tell_held()
            self._tell_safely(ready_line(seconds, stages))

    def _tell_held(self) -> None:
        if self._held is not None:
            line, self._held = self._held, None
            self._tell_safely(line)

    def _erase(self) -> None:
        if self._is_line_shown:
            self._write(_ERASE_LINE)
            self._is_line_shown = False

    def _write(self, text: str) -> None:
        try:
            if self._terminal is not None:
                self._terminal.write(text)
                self._terminal.flush()
        except (OSError, ValueError):  # the terminal has gone, or the stream was closed
            self._terminal = None

    def _tell_safely(self, line: str) -> None:
        try:
            self._tell(line)
        except (OSError, ValueError):
            pass


def terminal() -> TextIO | None:
    """Standard error, if it is a terminal."""
    try:
        return sys.stderr if sys.stderr is not None and sys.stderr.isatty() else None
    except ValueError:  # it was closed
        return None


def library_display() -> StartupDisplay:
    """For programs that use Headrace as a library: lines on a terminal, and elsewhere INFO messages of this module's
    logger. `logging.getLogger("headrace").setLevel(logging.WARNING)` turns both off."""
    stream = terminal()
    if stream is None or _package_log.level > logging.INFO:
        return StartupDisplay(_log.info)
    return StartupDisplay(lambda line: print(f"headrace: {line}", file=stream, flush=True), terminal=stream)


def log_stage(stage: StartupStage) -> None:
    """The `report` of a program that shows nothing itself."""
    if stage.is_finished:
        _log.info("%s", stage)


def log_warnings(warnings: tuple[str, ...]) -> None:
    """Warnings about settings, for programs that use Headrace as a library."""
    for warning in warnings:
        _log.warning("%s", warning)


def _num_columns() -> int:
    return shutil.get_terminal_size().columns
