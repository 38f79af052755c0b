"""A thread that reads something at an interval, and statistics over a window of what it read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any


class Sampler:
    """Calls `read` at once, every `interval_s`, and at the end. A reader that raises is not called again."""

    def __init__(self, read: Callable[[], None], interval_s: float, name: str) -> None:
        self._read = read
        self._interval_s = interval_s
        self._is_over = threading.Event()
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._read()
            while not self._is_over.wait(self._interval_s):
                self._read()
            self._read()
        except Exception as error:  # noqa: BLE001  told in the summary: telemetry must not end what it watches
            self.failure = error

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()


def mean_and_max(values: Iterable[float | None]) -> dict[str, float] | None:
    """None if nothing was read."""
    known = [value for value in values if value is not None]
    return {"mean": sum(known) / len(known), "max": max(known)} if known else None


def integral(points: Iterable[tuple[float, float | None]]) -> float | None:
    """Trapezoids under (seconds, value): watts become joules. None with fewer than two points."""
    known = [(at, value) for at, value in points if value is not None]
    if len(known) < 2:
        return None
    return sum((later[0] - earlier[0]) * (later[1] + earlier[1]) / 2 for earlier, later in pairwise(known))


def in_window(at: float, start: float | None, end: float | None) -> bool:
    return (start is None or at >= start) and (end is None or at <= end)


def unavailable(reason: str) -> dict[str, Any]:
    return {"available": False, "reason": f"not available: {reason}"}
