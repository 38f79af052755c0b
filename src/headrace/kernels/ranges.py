"""Named ranges around parts of a step, for the torch profiler and for NVIDIA's tools. Off unless a profiler records."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

PREFIX = "headrace."
OPERATION = "op."

Ranges = Callable[[str], AbstractContextManager[Any]]

_NOTHING = nullcontext()


def no_ranges(name: str) -> AbstractContextManager[Any]:
    return _NOTHING


def torch_ranges(name: str) -> AbstractContextManager[Any]:
    """Ranges that the torch profiler records."""
    return torch.profiler.record_function(PREFIX + name)


def nvtx_ranges(name: str) -> AbstractContextManager[Any]:
    """Ranges that nsys and ncu record."""
    return torch.cuda.nvtx.range(PREFIX + name)


class RangedKernels:
    """The kernels of a device, each call in a range of its own."""

    def __init__(self, kernels: ModuleType, ranges: Ranges) -> None:
        self._kernels = kernels
        self._ranges = ranges

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._kernels, name)
        ranges = self._ranges

        def call(*arguments: Any, **named: Any) -> Any:
            with ranges(OPERATION + name):
                return function(*arguments, **named)

        def attend(q: Any, cache: Any, layout: Any, *arguments: Any, **named: Any) -> Any:
            kind = "decode" if layout.max_query_len == 1 else "prefill"
            with ranges(f"{OPERATION}{name}.{kind}"):
                return function(q, cache, layout, *arguments, **named)

        ranged = attend if name == "paged_attention" else call
        setattr(self, name, ranged)  # the next lookup finds it at once
        return ranged
