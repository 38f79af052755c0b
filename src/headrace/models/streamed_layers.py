"""Chooses the layers whose weights stay in host memory, or on a disk, and stream through two buffers on the GPU.
Imports no torch.

Streamed layers are spread evenly, the last layer among them, so that the layers between two of them compute while the
next one is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

NUM_BUFFERS = 2  # one is read while the other is filled; as many in host memory for layers on a disk
ALIGNMENT = 256  # bytes: of tensors in a buffer, as PyTorch's allocator aligns its own


@dataclass(frozen=True, slots=True)
class StreamedLayers:
    """The layers that stream, counted from the first of the rank, and what that means in bytes."""

    indexes: tuple[int, ...]
    num_bytes: int  # copied to the GPU in every step
    buffer_bytes: int  # on the GPU, all buffers together
    disk_indexes: tuple[int, ...] = ()  # of `indexes`: those that are read from a disk in every step
    disk_bytes: int = 0
    staging_bytes: int = 0  # in host memory: buffers between the disk and the GPU

    @property
    def freed_bytes(self) -> int:
        """What the GPU has more for other things."""
        return self.num_bytes - self.buffer_bytes

    @property
    def host_bytes(self) -> int:
        """Pinned host memory."""
        return self.num_bytes - self.disk_bytes + self.staging_bytes


NONE_STREAMED = StreamedLayers((), 0, 0)


def choose_streamed(layer_bytes: Sequence[int], wanted_bytes: int) -> StreamedLayers:
    """The fewest layers that free as many bytes on the GPU as wanted; all layers, if no number of them does."""
    if wanted_bytes <= 0 or not layer_bytes:
        return NONE_STREAMED
    sizes = range(1, len(layer_bytes) + 1)
    choices = (_streamed(layer_bytes, number) for number in sizes)
    return next(
        (choice for choice in choices if choice.freed_bytes >= wanted_bytes), _streamed(layer_bytes, len(layer_bytes))
    )


def _streamed(layer_bytes: Sequence[int], number: int) -> StreamedLayers:
    indexes = spread(len(layer_bytes), number)
    sizes = [layer_bytes[index] for index in indexes]
    largest = -(-max(sizes) // ALIGNMENT) * ALIGNMENT
    return StreamedLayers(indexes, sum(sizes), min(NUM_BUFFERS, number) * largest)


def with_layers_on_disk(
    streamed: StreamedLayers, layer_bytes: Sequence[int], max_host_bytes: int
) -> StreamedLayers | None:
    """The same layers, with as few of them on a disk as let the others fit into so much host memory. They are spread
    evenly over the streamed ones. None: the staging buffers alone do not fit."""
    if streamed.host_bytes <= max_host_bytes:
        return streamed
    choices = (_on_disk(streamed, layer_bytes, number) for number in range(1, len(streamed.indexes) + 1))
    return next((choice for choice in choices if choice.host_bytes <= max_host_bytes), None)


def _on_disk(streamed: StreamedLayers, layer_bytes: Sequence[int], number: int) -> StreamedLayers:
    indexes = tuple(streamed.indexes[place] for place in spread(len(streamed.indexes), number))
    sizes = [layer_bytes[index] for index in indexes]
    staging = min(NUM_BUFFERS, number) * max(sizes)
    return replace(streamed, disk_indexes=indexes, disk_bytes=sum(sizes), staging_bytes=staging)


def spread(num_layers: int, number: int) -> tuple[int, ...]:
    """`number` of the layers at equal distances, the last one among them."""
    return tuple((each + 1) * num_layers // number - 1 for each in range(number))
