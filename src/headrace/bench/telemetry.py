"""What the machine did during a measurement: figures of its GPUs, CPU time and memory of the engine's processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.hardware.nvml import GpuSampler
from headrace.hardware.process_usage import ProcessSampler


class Telemetry:
    """Samples from `with` to its end. `pids` names the engine's processes on this machine, now and later."""

    def __init__(self, pids: Callable[[], Sequence[int]]) -> None:
        self._gpu = GpuSampler()
        self._processes = ProcessSampler(pids)

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, *_: object) -> None:
        self._gpu.stop()
        self._processes.stop()

    def summary(self) -> dict[str, Any]:
        return {"gpu": self._gpu.summary(), "processes": self._processes.summary()}
