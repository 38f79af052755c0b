"""Whether an engine's process still gets on, by what is heard of it. No threads, and the clock is given."""

from __future__ import annotations

from collections.abc import Callable

from headrace.engine.process.engine_process import VitalSigns


class Watch:
    """Adds up how long nothing was heard, and how long no step was finished while there was work. Looked at often."""

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._looked_at = clock()
        self._last = VitalSigns()
        self._silent_s = 0.0
        self._stalled_s = 0.0

    def complaint(self, signs: VitalSigns) -> str | None:
        """What is wrong, if it has been for longer than the timeout."""
        elapsed = self._elapsed()
        self._silent_s = 0.0 if signs.num_frames != self._last.num_frames else self._silent_s + elapsed
        has_moved = signs.num_finished_steps != self._last.num_finished_steps or not signs.has_work
        self._stalled_s = 0.0 if has_moved else self._stalled_s + elapsed
        self._last = signs
        if self._stalled_s > self._timeout_s:
            return f"it finished no step for {self._stalled_s:.0f} s, although it had work"
        if self._silent_s > self._timeout_s:
            return f"its process gave no sign of life for {self._silent_s:.0f} s"
        return None

    def _elapsed(self) -> float:
        """Since the last look. If that is very long, it was us who stood still, and the engine may be well."""
        now = self._clock()
        elapsed, self._looked_at = now - self._looked_at, now
        return min(elapsed, self._timeout_s / 4)
