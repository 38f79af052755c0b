"""Brings the weights of streamed layers to the GPU in time: in which order they are copied, and who waits for whom.

    copies    ▏2 ─▶ A▕▏5 ─▶ B▕      ▏8 ─▶ A▕▏11 ─▶ B▕         each waits for the layer that was in its buffer
    layers    ▏0 1▕    ▏2 (A)▕▏3 4▕▏5 (B)▕▏6 7▕▏8 (A)▕ ...    each streamed layer waits for its copy

A step is complete in itself: it begins with the first two copies, and all copies have been waited for when it ends. So
a CUDA graph can hold it, and no step depends on how the one before it ended. The bus is idle only from the last copy to
the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from headrace.models.streamed_layers import NUM_BUFFERS

Layer = TypeVar("Layer")


class CopyQueue(Protocol):
    """Copies that run beside the computation, in the order in which they were queued. Nothing here waits on the host.
    `runner/gpu/copy_stream.py` has the one of a GPU."""

    @property
    def needs_host(self) -> bool:
        """Whether the host takes part in every step: then no graph can hold the copies."""

    def wait_for_computation(self) -> None:
        """Lets copies that are queued from now on start only after all computation that is queued now."""

    def copy(self, source: Tensor, buffer: int) -> None:
        """Queues the copy of these bytes to the start of a buffer."""

    def let_computation_wait(self, buffer: int) -> None:
        """Lets computation that is queued from now on start only after the last copy to this buffer."""


@dataclass(frozen=True, slots=True)
class LayerStream:
    """The streamed layers of a decoder. Their tensors are views of the buffers: the first of them of buffer 0, the next
    of buffer 1, and so on in turn."""

    weights: dict[int, Tensor]  # by index of the layer, ascending: its bytes in host memory
    queue: CopyQueue

    @property
    def num_bytes(self) -> int:
        """Bytes that a step copies to the GPU."""
        return sum(weights.nbytes for weights in self.weights.values())

    def through(self, layers: Sequence[Layer]) -> Iterator[Layer]:
        """Yields the first layers of the decoder, or all, each when its weights may be read. What the caller queues
        before it asks for the next layer is the computation of this one."""
        order = [index for index in self.weights if index < len(layers)]
        places = {index: place for place, index in enumerate(order)}
        if order:
            self.queue.wait_for_computation()
        for place in range(min(NUM_BUFFERS, len(order))):
            self._copy(order, place)
        for index, layer in enumerate(layers):
            if index not in places:
                yield layer
                continue
            place = places[index]
            self.queue.let_computation_wait(place % NUM_BUFFERS)
            yield layer
            if place + NUM_BUFFERS < len(order):
                self.queue.wait_for_computation()
                self._copy(order, place + NUM_BUFFERS)

    def _copy(self, order: Sequence[int], place: int) -> None:
        self.queue.copy(self.weights[order[place]], place % NUM_BUFFERS)
