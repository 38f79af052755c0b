"""A reader of GPUs that passes on what a test gives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.hardware.nvml import GpuSample


class HandReader:
    source = "nvml"

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.is_stopped = False
        self.interval_s = 0.0
        self.take: Callable[[GpuSample], None] = lambda sample: None

    def open(self, take: Callable[[GpuSample], None], interval_s: float) -> HandReader:
        self.take, self.interval_s = take, interval_s
        return self

    def read(self, index: int = 0, at: float = 0.0, **figures: Any) -> None:
        self.take(GpuSample(at, index, f"GPU-{index}", "NVIDIA H200", **figures))

    def stop(self) -> None:
        self.is_stopped = True
