"""Launches that are recorded once and run again in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from headrace.kernels.ops.dispatch import has_numba, kernels_for


class Graph(Protocol):
    def run(self) -> Tensor: ...  # what the recorded function returned, computed anew; the next run overwrites it


class Recorder(Protocol):
    def record(self, function: Callable[[], Tensor]) -> tuple[Tensor, Graph] | None:
        """Runs a function; returns its result and the graph that computes it again. None: it cannot be recorded, and
        was not run to the end."""


def recorder(device: torch.device, dtype: torch.dtype) -> Recorder | None:
    """Returns what records launches on a CPU; None: nothing does. A GPU has CUDA graphs."""
    if device.type != "cpu" or dtype != torch.float32 or not has_numba():
        return None
    found: Recorder = kernels_for(device, dtype).Recorder()
    return found
