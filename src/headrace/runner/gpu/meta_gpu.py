"""Poses as a GPU: tensors on it are meta tensors, which have shapes and no values, and nothing waits or runs.

Everything that Python sees of a device is that of the GPU: `x.device`, `x.is_cuda`, what `torch.cuda` says. So the
code that starts a runner runs as it is, on any machine, and launches the same kernels (`kernels/gpu/launches.py`
records them). Only for processes that do nothing else: facts about "the GPU" are cached by many modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.overrides import TorchFunctionMode

from headrace.kernels.gpu.architectures import Architecture
from headrace.kernels.gpu.launches import Launch, record_launches, set_target

_DEVICE = torch.device("cuda", 0)
_NUM_PROCESSORS = 132  # decides how many programs a launch has, not what is compiled
_INDEXES = (torch.int32, torch.int64)
_LIBRARIES = ("fa3_fwd",)  # of operations that have no meta version; they fill tensors that were allocated before


@contextmanager
def meta_gpu(
    architecture: Architecture, *, total_memory: int, found: Callable[[Launch], None] = lambda launch: None
) -> Iterator[list[Launch]]:
    """Inside the block there is one GPU of this architecture; the list, and `found`, get the launches of Triton
    kernels."""
    set_target(architecture)
    with ExitStack() as stack:
        launches = stack.enter_context(record_launches(found))
        stack.enter_context(mock.patch.multiple(torch.cuda, **_functions(architecture, total_memory)))
        stack.enter_context(_MetaTensors())
        yield launches


class _MetaTensors(TorchFunctionMode):
    """Makes tensors of the GPU meta tensors, and lets these say that they are on the GPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.device:  # only tensors are elsewhere; whoever asks for the GPU gets it
            return func(*args, **(kwargs or {}))
        if func in _GETTERS:
            return _GETTERS[func](args[0])
        if func in _SHAPES and args[0].is_meta:
            return _SHAPES[func](*args, **(kwargs or {}))
        if func is torch.cat and args[0][0].is_meta:
            return _joined(*args, **(kwargs or {}))
        if func is torch.Tensor.__getitem__ and args[0].is_meta and (found := _indexed(*args)) is not None:
            return found
        if func is torch.arange:  # its meta version imports sympy
            return torch.arange(*args, dtype=(kwargs or {}).get("dtype")).to(
                _placed((kwargs or {}).get("device", "cpu"))
            )
        if func is torch.Tensor.copy_ and args[1].is_meta:
            return args[0]  # there are no values to copy
        if isinstance(func, OpOverloadPacket) and str(func).partition(".")[0] in _LIBRARIES:
            return None
        kwargs = {name: _placed(value) for name, value in (kwargs or {}).items()}
        if kwargs.pop("pin_memory", False):
            kwargs.pop("device", None)
        return func(*map(_placed, args), **kwargs)


def _placed(value: Any) -> Any:
    """The meta device instead of the GPU."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("meta")
    return "meta" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


def _device_of(x: Tensor) -> torch.device:
    return _DEVICE if x.is_meta else torch.device("cpu")


def _address_of(x: Tensor) -> int:
    """Relative to the start of its memory, which is aligned: kernels are compiled for the alignment."""
    return int(x.storage_offset()) * x.element_size()


_GETTERS: dict[Any, Callable[[Tensor], Any]] = {
    torch.Tensor.device.__get__: _device_of,
    torch.Tensor.is_cuda.__get__: lambda x: x.is_meta,  # type: ignore[attr-defined]
    torch.Tensor.data_ptr: _address_of,
    torch.Tensor.pin_memory: lambda x: x,
    torch.Tensor.cpu: lambda x: torch.zeros(x.shape, dtype=x.dtype) if x.is_meta else x,
}


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device="meta")


def _batched(x: Tensor, other: Tensor) -> Tensor:
    return torch.empty((*x.shape[:2], other.shape[2]), dtype=x.dtype, device="meta")


def _scaled_linear(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype, **scales: Any) -> Tensor:
    return torch.empty((x.shape[0], weight.shape[1]), dtype=out_dtype, device="meta")


def _arithmetic(x: Tensor, other: Tensor | float) -> Tensor:
    return torch.empty(_shape_of(x, other), dtype=torch.result_type(x, other), device="meta")


def _quotient(x: Tensor, other: Tensor | float) -> Tensor:
    dtype = torch.result_type(x, other)
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    return torch.empty(_shape_of(x, other), dtype=dtype, device="meta")


def _comparison(x: Tensor, other: Tensor | float) -> Tensor:
    return torch.empty(_shape_of(x, other), dtype=torch.bool, device="meta")


def _in_place(x: Tensor, *args: Any, **options: Any) -> Tensor:
    return x


def _where(condition: Tensor, x: Tensor, other: Tensor | float) -> Tensor:
    return torch.empty(_shape_of(condition, x), dtype=torch.result_type(x, other), device="meta")


def _like(x: Tensor, *limits: Any, **options: Any) -> Tensor:
    return torch.empty(x.shape, dtype=options.get("dtype") or x.dtype, device="meta")


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    first = parts[0]
    sizes = [*first.shape]
    sizes[dim] = sum(part.shape[dim] for part in parts)
    return torch.empty(sizes, dtype=first.dtype, device="meta")


def _shape_of(*operands: object) -> torch.Size:
    """The shape that operands are broadcast to; `torch.broadcast_shapes` imports sympy."""
    shapes = [each.shape for each in operands if isinstance(each, Tensor)]
    num_dims = max(map(len, shapes))
    padded = [(1,) * (num_dims - len(shape)) + tuple(shape) for shape in shapes]
    return torch.Size(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))


def _indexed(x: Tensor, key: Any) -> Tensor | None:
    """Indexed by tensors of numbers in the first dimensions; None: the key is of another kind."""
    key = key if isinstance(key, tuple) else (key,)
    indexes = [each for each in key if isinstance(each, Tensor)]
    new = key[len(indexes) :]
    if not indexes or any(each is not None for each in new) or any(each.dtype not in _INDEXES for each in indexes):
        return None
    shape = (*_shape_of(*indexes), *(1 for _ in new), *x.shape[len(indexes) :])
    return torch.empty(shape, dtype=x.dtype, device="meta")


def _selected(x: Tensor, dim: int, index: Tensor) -> Tensor:
    shape = list(x.shape)
    shape[dim] = index.shape[0]
    return torch.empty(shape, dtype=x.dtype, device="meta")


def _all(x: Tensor, dim: int) -> Tensor:
    return _reduced(x, dim, dtype=torch.bool)


def _reduced(x: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    shape = list(x.shape)
    shape[dim : dim % len(shape) + 1] = [1] if keepdim else []
    return torch.empty(shape, dtype=dtype or x.dtype, device="meta")


# Frequent operations, instead of their meta versions in Python: the first use of one of those imports sympy or all of
# `torch._dynamo`, which takes seconds. Operations that are missing here work all the same.
_SHAPES: dict[Any, Callable[..., Tensor]] = {
    torch.nn.functional.linear: _linear,
    torch.bmm: _batched,
    torch._scaled_mm: _scaled_linear,
    **dict.fromkeys((torch.Tensor.abs, torch.Tensor.square, torch.Tensor.neg), _like),
    **dict.fromkeys((torch.Tensor.amax, torch.Tensor.amin, torch.Tensor.sum), _reduced),
    **dict.fromkeys((torch.Tensor.clamp_, torch.Tensor.round_, torch.Tensor.square_, torch.Tensor.__ior__), _in_place),
    **dict.fromkeys((torch.empty_like, torch.zeros_like, torch.full_like, torch.Tensor.clamp), _like),
    **dict.fromkeys((torch.Tensor.__invert__, torch.Tensor.masked_fill), _like),
    **dict.fromkeys((torch.Tensor.add, torch.Tensor.sub, torch.Tensor.mul, torch.Tensor.remainder), _arithmetic),
    **dict.fromkeys((torch.Tensor.__floordiv__, torch.Tensor.__and__, torch.Tensor.__or__), _arithmetic),
    **dict.fromkeys((torch.Tensor.__lshift__, torch.Tensor.__rshift__), _arithmetic),
    **dict.fromkeys((torch.Tensor.gt, torch.Tensor.ge, torch.Tensor.lt, torch.Tensor.le), _comparison),
    **dict.fromkeys((torch.Tensor.eq, torch.Tensor.ne, torch.Tensor.__eq__, torch.Tensor.__ne__), _comparison),
    **dict.fromkeys((torch.Tensor.add_, torch.Tensor.mul_, torch.Tensor.masked_fill_), _in_place),
    **dict.fromkeys((torch.Tensor.index_copy_, torch.Tensor.scatter_add_, torch.Tensor.scatter_reduce_), _in_place),
    torch.Tensor.all: _all,
    **dict.fromkeys((torch.Tensor.div, torch.Tensor.__rdiv__), _quotient),
    torch.Tensor.index_select: _selected,
    torch.maximum: _arithmetic,
    torch.where: _where,
}


class _Event:
    """Has happened."""

    def __init__(self, **_: Any) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: _Event) -> float:
        return 1.0


class _Stream:
    def __init__(self, device: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...


class _Graph:
    def replay(self) -> None: ...


def _functions(architecture: Architecture, total_memory: int) -> dict[str, Any]:
    """What the runner uses of `torch.cuda`."""
    properties = SimpleNamespace(multi_processor_count=_NUM_PROCESSORS)
    return {
        "Event": _Event,
        "Stream": _Stream,
        "CUDAGraph": _Graph,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0),
        "current_device": lambda: 0,
        "current_stream": _Stream,
        "empty_cache": lambda: None,
        "get_device_capability": lambda device=None: architecture.capability,
        "get_device_properties": lambda device=None: properties,
        "graph": lambda *args, **options: nullcontext(),
        "graph_pool_handle": lambda: (0, 0),
        "is_available": lambda: True,
        "max_memory_allocated": lambda device=None: 0,
        "mem_get_info": lambda device=None: (total_memory, total_memory),
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda device=None: None,
    }
