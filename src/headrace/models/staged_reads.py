"""Reads layers from a disk into staging buffers, ahead of the steps that copy them to the GPU.

    disk      ▏a ─▶ 0▕▏b ─▶ 1▕▏c ─▶ 0▕▏a ─▶ 1▕▏b ─▶ 0▕ ...     a thread, always in the order of a step, over and over
    copies             ▏0 ─▶ GPU▕▏1 ─▶ GPU▕▏0 ─▶ GPU▕ ...      a buffer is read into again when its copy has ended

Weights do not change, so the thread also reads for the step after this one, and the disk is never idle.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from queue import SimpleQueue
from threading import Thread

from torch import Tensor

from headrace.errors import ModelError

Read = Callable[[Tensor, Tensor], None]  # (layer, buffer): fills the buffer


@dataclass(frozen=True, slots=True)
class _Free:
    buffer: Tensor
    wait: Callable[[], None]  # returns when the copy that reads the buffer has ended


@dataclass(frozen=True, slots=True)
class _Filled:
    layer: Tensor
    buffer: Tensor


class StagedReads:
    """Hands out each layer in host memory. The thread ends with this object."""

    def __init__(self, read: Read, layers: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """`layers`: those on the disk, in the order in which a step needs them."""
        self._addresses = frozenset(layer.data_ptr() for layer in layers)
        self._free: SimpleQueue[_Free | None] = SimpleQueue()
        self._filled: SimpleQueue[_Filled | Exception] = SimpleQueue()
        for buffer in buffers:
            self.give_back(buffer, _nothing)
        arguments = (read, tuple(layers), self._free, self._filled)  # not this object, which would then never end
        Thread(target=_read_in_turn, args=arguments, name="weights-from-disk", daemon=True).start()
        weakref.finalize(self, self._free.put, None)

    def take(self, layer: Tensor) -> Tensor | None:
        """Returns the buffer with this layer, which must be given back; waits for the disk. None: the layer is not on
        the disk. After a step that ended early the layers up to this one are passed over."""
        if layer.data_ptr() not in self._addresses:
            return None
        while True:
            found = self._filled.get()
            if isinstance(found, Exception):
                self._filled.put(found)  # for the next step too
                raise ModelError(f"weights cannot be read from cpu_offload_path: {found}") from found
            if found.layer.data_ptr() == layer.data_ptr():
                return found.buffer
            self.give_back(found.buffer, _nothing)

    def give_back(self, buffer: Tensor, wait: Callable[[], None]) -> None:
        """Lets the thread read into the buffer after `wait` has returned, which it calls."""
        self._free.put(_Free(buffer, wait))


def _read_in_turn(
    read: Read,
    layers: Sequence[Tensor],
    free: SimpleQueue[_Free | None],
    filled: SimpleQueue[_Filled | Exception],
) -> None:
    try:
        for layer in cycle(layers):
            found = free.get()
            if found is None:
                return
            found.wait()
            read(layer, found.buffer)
            filled.put(_Filled(layer, found.buffer))
    except (OSError, RuntimeError) as error:  # reported by the step that needs the layer
        filled.put(error)


def _nothing() -> None:
    pass
