"""Moves the weights of a layer into one run of host memory, and makes the same layer over a buffer of the GPU.

    layer as loaded ─▶ `to_host`: the same objects, every tensor a view of one run of bytes in host memory
                    ─▶ `over`: the same objects again, every tensor at the same place of a buffer on the GPU

So a layer is one copy, whatever its matrices are: in 16 bits, packed, experts. What it shares with other layers (rotary
tables) stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from headrace.models.decoder import Layer
from headrace.models.streamed_layers import ALIGNMENT, NUM_BUFFERS
from headrace.models.streaming import CopyQueue, LayerStream

Value = TypeVar("Value")
Allocate = Callable[[int], Tensor]  # bytes -> [bytes] uint8

_OWN_MODULES = ("headrace.models.", "headrace.kernels.")  # whose objects hold weights; those of `dist` do not


@dataclass(frozen=True, slots=True)
class Offload:
    """Where streamed layers live: `indexes` of them, counted from the first of the rank."""

    indexes: frozenset[int]
    allocate_host: Allocate  # memory that the GPU copies from
    allocate_buffers: Callable[[int, int], list[Tensor]]  # (number, bytes of each) -> buffers on the GPU, zeros
    queue_for: Callable[[list[Tensor]], CopyQueue]  # called when all layers are loaded
    disk_indexes: frozenset[int] = frozenset()  # of `indexes`: layers that `allocate_on_disk` has room for
    allocate_on_disk: Allocate | None = None


@dataclass(frozen=True, slots=True)
class HostLayer:
    layer: Layer  # its tensors are views of `weights`, except shared ones
    weights: Tensor  # [bytes] uint8


class OffloadedLayers:
    """Takes the layers of a decoder as they are loaded, so that only one streamed layer at a time is on the GPU."""

    def __init__(self, offload: Offload, shared: Iterable[Tensor]) -> None:
        self._offload = offload
        self._shared = frozenset(tensor.untyped_storage().data_ptr() for tensor in shared)
        self._layers: list[Layer | HostLayer] = []

    def add(self, layer: Layer) -> None:
        index = len(self._layers)
        is_streamed = index in self._offload.indexes
        self._layers.append(to_host(layer, self._shared, self._allocate(index)) if is_streamed else layer)

    def _allocate(self, index: int) -> Allocate:
        if index not in self._offload.disk_indexes:
            return self._offload.allocate_host
        assert self._offload.allocate_on_disk is not None
        return self._offload.allocate_on_disk

    def finish(self) -> tuple[tuple[Layer, ...], LayerStream]:
        """Allocates the buffers, and returns all layers, the streamed ones over their buffers."""
        hosted = {index: layer for index, layer in enumerate(self._layers) if isinstance(layer, HostLayer)}
        largest = max(layer.weights.nbytes for layer in hosted.values())
        buffers = self._offload.allocate_buffers(min(NUM_BUFFERS, len(hosted)), largest)
        turns = {index: turn for turn, index in enumerate(hosted)}
        layers = (
            over(layer, buffers[turns[index] % NUM_BUFFERS]) if isinstance(layer, HostLayer) else layer
            for index, layer in enumerate(self._layers)
        )
        weights = {index: layer.weights for index, layer in hosted.items()}
        return tuple(layers), LayerStream(weights, self._offload.queue_for(buffers))


def to_host(layer: Layer, shared: frozenset[int], allocate: Allocate) -> HostLayer:
    """Copies all tensors of the layer to host memory, those in one storage together. `shared`: addresses of storages
    that stay as they are."""
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in shared:
            storages.setdefault(storage.data_ptr(), storage)
        return tensor

    with_tensors(layer, note)
    starts, end = {}, 0
    for address, storage in storages.items():
        starts[address] = end
        end += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
    weights = allocate(end)
    for address, storage in storages.items():
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        weights[starts[address] : starts[address] + storage.nbytes()].copy_(source)

    def moved(tensor: Tensor) -> Tensor:
        start = starts.get(tensor.untyped_storage().data_ptr())
        return tensor if start is None else _view(weights, tensor, start)

    return HostLayer(with_tensors(layer, moved), weights)


def over(host: HostLayer, buffer: Tensor) -> Layer:
    """The layer with its tensors in the buffer, where they are in host memory."""
    address = host.weights.untyped_storage().data_ptr()

    def moved(tensor: Tensor) -> Tensor:
        is_own = tensor.untyped_storage().data_ptr() == address
        return _view(buffer, tensor, 0) if is_own else tensor

    return with_tensors(host.layer, moved)


def _view(run: Tensor, tensor: Tensor, start: int) -> Tensor:
    """A tensor of the same shape, strides and place in its storage, which begins at this byte of a run."""
    offset = start // tensor.itemsize + tensor.storage_offset()
    return run.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), offset)


def with_tensors(value: Value, replaced: Callable[[Tensor], Tensor]) -> Value:
    """The same object with other tensors, found through dataclasses, tuples, lists and objects of models and kernels.
    What holds no tensor is shared."""
    found: Any = value
    if isinstance(found, Tensor):
        return cast(Value, replaced(found))
    if isinstance(found, tuple | list):
        parts = [with_tensors(part, replaced) for part in found]
        is_same = all(part is old for part, old in zip(parts, found, strict=True))
        return value if is_same else cast(Value, _sequence_of(type(found), parts))
    if not type(found).__module__.startswith(_OWN_MODULES):
        return value
    if is_dataclass(found):
        changed = _changed({each.name: getattr(found, each.name) for each in fields(found)}, replaced)
        return cast(Value, replace(found, **changed)) if changed else value  # type: ignore[type-var]
    changed = _changed(vars(found), replaced) if hasattr(found, "__dict__") else {}
    return cast(Value, _with_attributes(found, changed)) if changed else value


def _sequence_of(kind: type, parts: list[Any]) -> Any:
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def _changed(values: dict[str, Any], replaced: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    others = {name: with_tensors(value, replaced) for name, value in values.items()}
    return {name: value for name, value in others.items() if value is not values[name]}


def _with_attributes(value: Any, changed: dict[str, Any]) -> Any:
    copied = object.__new__(type(value))
    vars(copied).update(vars(value) | changed)
    return copied
