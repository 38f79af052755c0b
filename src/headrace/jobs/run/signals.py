"""SIGINT (Ctrl-C) and SIGTERM in a job. What a stop then means is in `stop_state.py`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from headrace.errors import ResumableJobError
from headrace.jobs.run.stop_state import StopRequest
from headrace.jobs.spec import JobSpec


@contextmanager
def sigterm_raises(job: JobSpec) -> Iterator[None]:
    """Let SIGTERM raise an error, in phases without lines in flight (loading the model, publishing). The job can be
    resumed."""
    if threading.current_thread() is not threading.main_thread() or not job.is_resumable:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise ResumableJobError(
            "stopped by SIGTERM while no line was in flight; run the same command again to continue"
        )

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def stop_on_signals(send: Callable[[StopRequest], None], tell: Callable[[], None]) -> Iterator[None]:
    """Let the first SIGINT or SIGTERM send a request to stop to the main loop. The handlers from before are restored
    then, so a second signal acts as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def request_stop(number: int, frame: FrameType | None) -> None:
        restore()
        send(StopRequest())
        tell()

    for number in previous:
        signal.signal(number, request_stop)
    try:
        yield
    finally:
        restore()
