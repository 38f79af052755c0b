"""Named ranges around parts of a step, for the torch profiler and for NVIDIA's tools.

They exist only while a profiler records: functions are wrapped then, and are themselves again afterwards, so that a
step without a profiler pays nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

PREFIX = "headrace."
OPERATION = "op."

Ranges = Callable[[str], AbstractContextManager[Any]]


def torch_ranges(name: str) -> AbstractContextManager[Any]:
    """Ranges that the torch profiler records."""
    return torch.profiler.record_function(PREFIX + name)


def nvtx_ranges(name: str) -> AbstractContextManager[Any]:
    """Ranges that nsys and ncu record."""
    return torch.cuda.nvtx.range(PREFIX + name)


def wrap_methods(owner: object, names: Mapping[str, str], ranges: Ranges | None) -> None:
    """Put each call of these methods of one object into a range; None: no more. `names`: of the ranges, by method."""
    for method, name in names.items():
        vars(owner).pop(method, None)  # the class's own method again
        if ranges is not None:
            setattr(owner, method, _ranged(getattr(owner, method), ranges, name))


def _ranged(function: Callable[..., Any], ranges: Ranges, name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        with ranges(name):
            return function(*arguments, **named)

    return call


class RangedKernels:
    """The kernels of a device, each call in a range of its own."""

    def __init__(self, kernels: ModuleType, ranges: Ranges) -> None:
        self._kernels = kernels
        self._ranges = ranges

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._kernels, name)
        ranges = self._ranges

        def attend(q: Any, cache: Any, layout: Any, *arguments: Any, **named: Any) -> Any:
            kind = "decode" if layout.max_query_len == 1 else "prefill"
            with ranges(f"{OPERATION}{name}.{kind}"):
                return function(q, cache, layout, *arguments, **named)

        is_attention = name in ("paged_attention", "latent_attention")
        ranged = attend if is_attention else _ranged(function, ranges, OPERATION + name)
        setattr(self, name, ranged)  # the next lookup finds it at once
        return ranged
