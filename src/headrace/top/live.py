"""The live screen of `headrace top`. Ctrl-C and SIGTERM leave the terminal as it was."""

from __future__ import annotations

import signal
import threading
from time import monotonic, sleep
from types import FrameType
from typing import TYPE_CHECKING

from headrace.top.view import rich_view
from headrace.top.watch import Watch

if TYPE_CHECKING:
    from rich.console import Console

TERMINATED = 128 + signal.SIGTERM


def show_live(watch: Watch, console: Console, *, interval_s: float) -> None:
    """Redraw after each interval until Ctrl-C."""
    from rich.live import Live

    _leave_at_sigterm()
    try:
        with Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live:
            while True:
                started = monotonic()
                reading = watch.read()
                view = rich_view(
                    reading, list(watch.history), width=console.width, height=console.height, interval_s=interval_s
                )
                live.update(view, refresh=True)
                sleep(max(0.0, interval_s - (monotonic() - started)))
    except KeyboardInterrupt:
        return


def _leave_at_sigterm() -> None:
    """The default would end the process on the alternate screen, with a hidden cursor."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(TERMINATED)
