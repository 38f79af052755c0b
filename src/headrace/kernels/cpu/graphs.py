"""Launches that were recorded once and then run in one call, as CUDA graphs are on a GPU.

A step of few tokens takes hundreds of launches of a few microseconds each, and as long again to prepare them in Python.

A function can be recorded if it computes with this package's kernels alone: PyTorch may only make views and allocate
memory in it. The tensors that it makes then lie in `Memory`, and their addresses are those of every later run.
"""

from __future__ import annotations

import ctypes
import logging
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headrace.kernels.cpu.launch import Kernel, own_team, recorded_by
from headrace.kernels.cpu.team import can_have_helpers

_ALIGNMENT = 64  # bytes, a cache line
_MIN_BYTES = 4096
Bytes = npt.NDArray[np.uint8]

log = logging.getLogger(__name__)


class _OtherOperationError(Exception):
    """An operation of PyTorch that computes something."""


class Memory:
    """Buffers for the tensors that recorded functions make. A buffer is used again once its tensor has died. Graphs
    share them, since only one runs at a time."""

    def __init__(self) -> None:
        self._free: dict[int, list[Bytes]] = defaultdict(list)
        self._buffers: dict[int, Bytes] = {}  # by address

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        size = max(_MIN_BYTES, 1 << (num_bytes - 1).bit_length())
        free = self._free[size]
        buffer = free.pop() if free else self._allocate(size)
        lent = buffer[:num_bytes]  # lives as long as the tensor's memory
        weakref.finalize(lent, free.append, buffer).atexit = False
        return torch.from_numpy(lent).view(dtype).view(shape)

    @property
    def num_buffers(self) -> int:
        return len(self._buffers)

    def has(self, tensor: Tensor) -> bool:
        return _memory_of(tensor) in self._buffers

    def lasting(self, tensor: Tensor) -> Tensor:
        """Returns the same tensor, which may be written over once `tensor` has died."""
        if not self.has(tensor):
            return tensor
        memory = torch.from_numpy(self._buffers[_memory_of(tensor)]).view(tensor.dtype)
        return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _allocate(self, size: int) -> Bytes:
        memory = np.empty(size + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        buffer = memory[start : start + size]
        self._buffers[buffer.ctypes.data] = buffer
        return buffer


class Graph:
    """The launches of a function, and the tensor that it returned. It is itself the recording of them."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._launches: list[tuple[Kernel, ctypes.Structure]] = []
        self._nums_helpers: list[int] = []
        self._kept: dict[int, Tensor] = {}  # what launches read or write outside of `memory`, by address

    def add(self, kernel: Kernel, arguments: ctypes.Structure, tensors: Iterable[Tensor], *, num_helpers: int) -> None:
        """See `launch.Recording`."""
        self._launches.append((kernel, arguments))
        self._nums_helpers.append(num_helpers)
        self._kept.update((tensor.data_ptr(), tensor) for tensor in tensors if not self._memory.has(tensor))

    def end(self, output: Tensor) -> None:
        for _, arguments in self._launches:
            arguments.next_task = 0
        self._output = self._memory.lasting(output)
        entries = np.array([kernel.address for kernel, _ in self._launches], np.int64)
        addresses = np.array([ctypes.addressof(arguments) for _, arguments in self._launches], np.int64)
        self._numbers = entries, addresses, np.array(self._nums_helpers, np.int64)

    def run(self) -> Tensor:
        """Computes the output anew, from what the recorded function's inputs hold now. The next run overwrites it."""
        own_team().run_all(*self._numbers)
        return self._output


class Recorder:
    """Records the graphs of one runner, in one memory."""

    def __init__(self) -> None:
        self.memory = Memory()

    def record(self, function: Callable[[], Tensor]) -> tuple[Tensor, Graph] | None:
        """Runs a function and returns its result, and the graph that computes it again. None: it computes something
        without our kernels, and was left before that, or this system has no team of threads."""
        if not can_have_helpers():
            return None
        graph = Graph(self.memory)
        try:
            with recorded_by(graph), _OnlyKernels(self.memory):
                output = function()
        except _OtherOperationError as operation:
            log.debug("steps of few tokens are run kernel by kernel: %s is not one of ours", operation)
            return None
        graph.end(output)
        return output, graph


class _OnlyKernels(TorchFunctionMode):
    """Allocates tensors in `memory`, lets views be made, and refuses all other functions of PyTorch."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.empty and not kwargs.keys() - {"dtype", "device"}:
            shape = args if isinstance(args[0], int) else args[0]
            return self._memory.empty(tuple(shape), kwargs.get("dtype") or torch.get_default_dtype())
        if function is torch.empty_like and args[0].is_contiguous() and not kwargs:
            return self._memory.empty(tuple(args[0].shape), args[0].dtype)
        name = function.__name__
        if name not in _VIEWS | _FACTS:
            raise _OtherOperationError(name)
        result = function(*args, **kwargs)
        if name in _VIEWS and _memory_of(result) != _memory_of(args[0]):
            raise _OtherOperationError(f"{name} of memory that must be copied")
        return result


_VIEWS = {
    *("__getitem__", "contiguous", "detach", "flatten", "narrow", "reshape", "select", "squeeze", "t", "transpose"),
    *("unflatten", "unsqueeze", "view"),
}
_FACTS = {
    *("__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "numel", "size", "storage_offset"),
    *("stride", "untyped_storage"),
}


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
