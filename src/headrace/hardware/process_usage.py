"""CPU time and memory of an engine's processes during a run, by psutil."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, NamedTuple

import psutil

from headrace.hardware.sampler import Sampler, in_window, unavailable

INTERVAL_S = 0.2


class _Reading(NamedTuple):
    at: float  # `time.monotonic`
    cpu_s: dict[tuple[int, float], float]  # by process id and start time: ids are used again
    rss_bytes: int  # of all processes together; shared pages count for each


class ProcessSampler:
    """Reads the processes that `pids` names now, and so also those that start later. Never raises."""

    def __init__(self, pids: Callable[[], Sequence[int]], interval_s: float = INTERVAL_S) -> None:
        self._pids = pids
        self._readings: list[_Reading] = []
        self._sampler = Sampler(self._read, interval_s, "process-usage")

    def _read(self) -> None:
        cpu_s, rss_bytes = {}, 0
        for pid in self._pids():
            try:
                process = psutil.Process(pid)
                with process.oneshot():
                    times = process.cpu_times()
                    cpu_s[pid, process.create_time()] = times.user + times.system
                    rss_bytes += process.memory_info().rss
            except psutil.Error:
                continue  # it has ended
        self._readings.append(_Reading(monotonic(), cpu_s, rss_bytes))

    def stop(self) -> None:
        self._sampler.stop()

    def __enter__(self) -> ProcessSampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def summary(self, start: float | None = None, end: float | None = None) -> dict[str, Any]:
        """CPU seconds that were used in the window, and the largest memory seen."""
        readings = [reading for reading in list(self._readings) if in_window(reading.at, start, end)]
        seen = {key for reading in readings for key in reading.cpu_s}
        if not seen:
            failure = self._sampler.failure
            return unavailable(f"no processes on this machine{'' if failure is None else f' ({failure})'}")
        return {
            "available": True,
            "num_processes": len(seen),
            "seconds": readings[-1].at - readings[0].at,
            "cpu_s": sum(_used(key, readings) for key in seen),
            "peak_rss_bytes": max(reading.rss_bytes for reading in readings),
        }


def _used(key: tuple[int, float], readings: Sequence[_Reading]) -> float:
    """CPU seconds of a process between its first and last reading; all of them if it started within the window."""
    values = [reading.cpu_s[key] for reading in readings if key in reading.cpu_s]
    return values[-1] - (values[0] if key in readings[0].cpu_s else 0.0)
