"""Launches that were recorded once and then run in one call, as CUDA graphs are on a GPU.

A step of few tokens takes hundreds of launches of a few microseconds each, and as long again to prepare them in Python
and to wake the threads. A graph is entered once by all threads, which run one launch after the other with a barrier
between them.

A function can be recorded if it computes with this package's kernels alone: PyTorch may only make views and allocate
memory in it. The tensors that it makes then lie in `Memory`, and their addresses are those of every later run.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import platform
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headrace.kernels.cpu.launch import (
    Kernel,
    Pointer,
    arguments_at,
    inner,
    int64s,
    kernel,
    recorded_by,
    team_size_address,
)

_ALIGNMENT = 64  # bytes, a cache line
_MIN_BYTES = 4096
_LOOKS = 4000  # about 50 us, longer than a thread usually waits; then other programs may have the core
_IS_X86 = platform.machine() in ("x86_64", "AMD64")
_PAUSE = "llvm.x86.sse2.pause"
_WORD = ir.IntType(64)

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
        self._kept: dict[int, Tensor] = {}  # what launches read or write outside of `memory`, by address
        self._num_arrived = torch.zeros(1, dtype=torch.int64)

    def add(self, kernel: Kernel, arguments: ctypes.Structure, tensors: Iterable[Tensor]) -> None:
        """See `launch.Recording`."""
        self._launches.append((kernel, arguments))
        self._kept.update((tensor.data_ptr(), tensor) for tensor in tensors if not self._memory.has(tensor))

    def end(self, output: Tensor) -> None:
        for _, arguments in self._launches:
            arguments.next_task = 0
        self._output = self._memory.lasting(output)
        self._entries = torch.tensor([kernel.address for kernel, _ in self._launches])
        self._arguments = torch.tensor([ctypes.addressof(arguments) for _, arguments in self._launches])

    def run(self) -> Tensor:
        """Computes the output anew, from what the recorded function's inputs hold now. The next run overwrites it."""
        self._num_arrived[0] = 0
        numbers = (len(self._launches), self._num_arrived, team_size_address() or 0, _yield_address())
        _run(self._entries, self._arguments, *numbers, num_tasks=torch.get_num_threads())
        return self._output


class Recorder:
    """Records the graphs of one runner, in one memory."""

    def __init__(self) -> None:
        self.memory = Memory()

    def record(self, function: Callable[[], Tensor]) -> tuple[Tensor, Graph] | None:
        """Runs a function and returns its result, and the graph that computes it again. None: it computes something
        without our kernels, and was left before that, or threads have no barrier to meet at."""
        if torch.get_num_threads() > 1 and team_size_address() is None:
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


@functools.cache
def _yield_address() -> int:
    return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0


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


@kernel(
    entries="pointer",
    arguments="pointer",
    num_launches="integer",
    num_arrived="pointer",  # threads that have finished a launch, each counted once for each of them
    team_size="pointer",  # 0: one thread
    yield_cpu="pointer",
)
def _run(pointer: Pointer) -> None:
    a = arguments_at(pointer)
    entries, arguments = int64s(a.entries), int64s(a.arguments)
    num_threads = 1
    if a.team_size != 0:
        num_threads = _call(a.team_size)
    for launch in range(a.num_launches):
        _start(entries[launch], arguments[launch])
        if num_threads > 1:
            _wait_for(int64s(a.num_arrived), (launch + 1) * num_threads, a.yield_cpu)
        int64s(arguments[launch])[0] = 0  # the next task of the next run: no thread asks for one any more


@inner
def _wait_for(num_arrived: Pointer, expected: int, yield_cpu: int) -> None:
    """Counts this thread, and waits until so many have arrived. libgomp's own barrier sends threads to sleep at once if
    it knows of more of them than there are cores."""
    num_seen = _add_one(num_arrived) + 1
    num_looks = 0
    while num_seen < expected:
        if num_looks < _LOOKS:
            _pause()
            num_looks += 1
        else:
            _call(yield_cpu)
        num_seen = _look_at(num_arrived)


@intrinsic
def _start(typing: Any, entry: Any, argument: Any) -> Any:
    """Calls the kernel at an address."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [_WORD])
        builder.call(builder.inttoptr(args[0], function.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def _call(typing: Any, address: Any) -> Any:
    """Calls the C function without arguments at an address, which returns an int."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.IntType(32), [])
        return builder.sext(builder.call(builder.inttoptr(args[0], function.as_pointer()), []), _WORD)

    return types.int64(types.int64), emit


@intrinsic
def _add_one(typing: Any, counter: Any) -> Any:
    """Returns what was there before. What this thread wrote is seen by whoever sees the new number."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", args[0], _WORD(1), "acq_rel")

    return types.int64(counter), emit


@intrinsic
def _look_at(typing: Any, counter: Any) -> Any:
    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.load_atomic(args[0], "acquire", 8)

    return types.int64(counter), emit


@intrinsic
def _pause(typing: Any) -> Any:
    """Tells the core that this thread only waits."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        if _IS_X86:
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), []), _PAUSE)
            builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), emit
