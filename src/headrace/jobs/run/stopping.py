"""How a job is asked to come to an end: signals, at a terminal or from a service manager."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from headrace.errors import ResumableJobError
from headrace.jobs.spec import JobSpec


@dataclass(frozen=True, slots=True)
class Stop:
    """The user wants out."""

    is_cancelled: bool = False
    is_expired: bool = False  # not the user, but the deadline


@contextmanager
def term_raises(job: JobSpec) -> Iterator[None]:
    """While the model is loaded, or the output published, there is nothing to bring to an end: a SIGTERM is an error
    that can be resumed."""
    if threading.current_thread() is not threading.main_thread() or not job.is_resumable:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise ResumableJobError("stopped by SIGTERM while nothing was running; the same command goes on from there")

    ordinary = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, ordinary)


@contextmanager
def stop_on_signals(send: Callable[[Stop], None], tell: Callable[[], None]) -> Iterator[None]:
    """The first SIGINT (Ctrl-C) or SIGTERM asks the job to come to an end; the second is an ordinary one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ordinary = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in ordinary.items():
            signal.signal(number, handler)

    def ask(number: int, frame: FrameType | None) -> None:
        restore()
        send(Stop())
        tell()

    for number in ordinary:
        signal.signal(number, ask)
    try:
        yield
    finally:
        restore()
