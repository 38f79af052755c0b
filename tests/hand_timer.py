"""A clock that moves only when told to."""

from __future__ import annotations

from collections.abc import Callable


class HandAlarm:
    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when, self.callback, self.is_cancelled = when, callback, False

    def cancel(self) -> None:
        self.is_cancelled = True


class HandTimer:
    def __init__(self) -> None:
        self.now = 0.0
        self._alarms: list[HandAlarm] = []

    def time(self) -> float:
        return self.now

    def __call__(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> HandAlarm:
        alarm = HandAlarm(self.now + delay, callback)
        self._alarms.append(alarm)
        return alarm

    @property
    def num_set(self) -> int:
        return sum(not alarm.is_cancelled for alarm in self._alarms)

    def move(self, seconds: float) -> None:
        """In steps from alarm to alarm, so that each rings at its own time."""
        end = self.now + seconds
        while due := [alarm for alarm in self._alarms if not alarm.is_cancelled and alarm.when <= end + 1e-9]:
            alarm = min(due, key=lambda one: one.when)
            self.now = max(self.now, alarm.when)
            self._alarms.remove(alarm)
            alarm.callback()
        self.now = end
