"""Sends small integer arrays to the GPU: one pinned buffer a step, one copy, no wait."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_NUM_BUFFERS = 4
_FIRST_CAPACITY = 1 << 18


class Upload:
    """The upload of one step: `put` appends arrays to the buffer, `send` copies the new ones at once."""

    def __init__(self, host: Tensor, device: Tensor) -> None:
        self._host = host.numpy()
        self._pinned = host
        self._device = device
        self._end = 0
        self._num_sent = 0

    def put(self, values: npt.ArrayLike) -> slice:
        array = np.asarray(values)
        place = slice(self._end, self._end + array.size)
        self._host[place] = array.reshape(-1)
        self._end = place.stop + (-place.stop) % 4  # keeps every array aligned to 16 bytes
        return place

    def send(self) -> None:
        """Copy what was put since the last call."""
        if self._end > self._num_sent:
            new = slice(self._num_sent, self._end)
            self._device[new].copy_(self._pinned[new], non_blocking=True)
            self._num_sent = self._end

    def get(self, place: slice) -> Tensor:
        """The device's copy of what `put` returned `place` for; valid once sent."""
        return self._device[place]


class UploadRing:
    """Owns the buffers. A buffer is reused only after the step that read it is done."""

    def __init__(self, device: torch.device) -> None:
        self._target = device
        self._buffers: list[tuple[Tensor, Tensor, torch.cuda.Event]] = []
        self._next = 0
        self._capacity = _FIRST_CAPACITY
        self._allocate()

    def begin(self, num_values: int) -> Upload:
        """A free buffer with room for `num_values` int32 values."""
        if num_values > self._capacity:
            torch.cuda.synchronize(self._target)
            self._capacity = 2 * num_values
            self._allocate()
        host, device, used = self._buffers[self._next]
        used.synchronize()
        return Upload(host, device)

    def end(self) -> None:
        """Mark the buffer as in use until the queued step is done."""
        self._buffers[self._next][2].record()
        self._next = (self._next + 1) % _NUM_BUFFERS

    def _allocate(self) -> None:
        self._buffers = [
            (
                torch.empty(self._capacity, dtype=torch.int32, pin_memory=True),
                torch.empty(self._capacity, dtype=torch.int32, device=self._target),
                torch.cuda.Event(),
            )
            for _ in range(_NUM_BUFFERS)
        ]
