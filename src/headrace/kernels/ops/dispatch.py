"""Picks the kernels by the device and type of the tensors, and puts ranges around them while a profiler records."""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType
from typing import cast

import torch

from headrace.kernels import reference
from headrace.kernels.ranges import RangedKernels, Ranges
from headrace.startup import OnStage, ignore_stage

_ranges: Ranges | None = None


def warm_up(device: torch.device, dtype: torch.dtype, on_stage: OnStage = ignore_stage) -> None:
    """Compiles or loads what steps of this type need, so that no step waits for it."""
    if device.type == "cpu" and dtype == torch.float32 and has_numba():
        from headrace.kernels import cpu

        cpu.warm_up(on_stage)


@functools.cache
def kernels_for(device: torch.device, dtype: torch.dtype) -> ModuleType:
    kernels = _kernels_for(device, dtype)
    return kernels if _ranges is None else cast(ModuleType, RangedKernels(kernels, _ranges))


def _kernels_for(device: torch.device, dtype: torch.dtype) -> ModuleType:
    if device.type == "cpu" and dtype == torch.float32 and has_numba():
        from headrace.kernels import cpu  # imported late: numba takes a while

        return cpu
    if device.type == "cuda":
        from headrace.kernels import gpu

        return gpu
    return reference


def has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


def record_ranges(ranges: Ranges | None) -> None:
    """Put a range around each operation from now on; None: no more. Without ranges an operation pays nothing for
    this."""
    global _ranges  # noqa: PLW0603  one profiler per process
    _ranges = ranges
    kernels_for.cache_clear()
    if has_numba():
        from headrace.kernels.cpu import linear

        linear.record_ranges(ranges)
