"""Decides from what a process has sent whether its engine hangs. No threads; the clock is an argument."""

from __future__ import annotations

from collections.abc import Callable

from headrace.engine.process.engine_process import ProcessHealth


class HealthCheck:
    """Adds up for how long the process was silent, and for how long it finished no step although it had work. To be
    called often."""

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._checked_at = clock()
        self._last = ProcessHealth()
        self._silent_s = 0.0
        self._stalled_s = 0.0

    def problem(self, health: ProcessHealth) -> str | None:
        """What is wrong, if it has lasted for longer than the timeout."""
        elapsed = self._elapsed()
        self._silent_s = 0.0 if health.num_frames != self._last.num_frames else self._silent_s + elapsed
        has_moved = health.num_finished_steps != self._last.num_finished_steps or not health.has_work
        self._stalled_s = 0.0 if has_moved else self._stalled_s + elapsed
        self._last = health
        if self._stalled_s > self._timeout_s:
            return f"it finished no step for {self._stalled_s:.0f} s, although it had work"
        if self._silent_s > self._timeout_s:
            return f"its process sent no heartbeat for {self._silent_s:.0f} s"
        return None

    def _elapsed(self) -> float:
        """Returns the seconds since the last check. A very long time means that this process was suspended itself, so
        it counts only in part."""
        now = self._clock()
        elapsed, self._checked_at = now - self._checked_at, now
        return min(elapsed, self._timeout_s / 4)
