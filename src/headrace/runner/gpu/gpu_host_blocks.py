"""The memory of the host tier (`kv/tiers.py`) of a GPU: pinned, with copies on a stream of their own.

    compute   ── step N-1 ──┬── step N ────────────┬── step N+1 ──
    copies                  └─ out of N, in of N ──┘

The copies of plan N begin when step N-1 has ended, run beside step N, and end before step N+1 begins: the compute
stream waits for them, the host never does. If the plan is urgent, step N waits for them too. All copies are on one
stream, so their order is that of the plans, in both directions.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.gpu import block_transfer
from headrace.kernels.layout import LayerCache
from headrace.runner.gpu.pinned_memory import pinned_memory
from headrace.runner.host_blocks import LastStep
from headrace.steps import BlockTransfers, IntArray

_WORD_BYTES = 8
_MAX_EVENTS = 64  # of past steps: an older one has ended for sure, or the newer one is waited for


class GpuHostBlocks:
    """Owns the pinned rows of the host tier, one for each place, and the stream of the copies."""

    def __init__(self, caches: list[LayerCache], num_places: int, device: torch.device) -> None:
        sides = [side for cache in caches for side in cache.raw_sides]
        self._side_words = sides[0].shape[1]
        assert all(side.shape[1] == self._side_words for side in sides), "layers with blocks of different sizes"
        self._device = device
        self._sides = sides  # keeps the memory behind the addresses
        self._addresses = torch.tensor([side.data_ptr() for side in sides], dtype=torch.int64, device=device)
        row_words = self._side_words * len(sides)
        pinned = pinned_memory(num_places * row_words * _WORD_BYTES, setting="kv_offload_gib")
        self._rows = pinned.view(torch.int64).view(num_places, row_words)
        self._stream = torch.cuda.Stream(device)
        self._last: torch.cuda.Event | None = None  # copies that the next step has to wait for
        self._events: deque[tuple[int, torch.cuda.Event]] = deque(maxlen=_MAX_EVENTS)
        self._launched = LastStep()
        self._compile(num_blocks=sides[0].shape[0])

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """[num_places, bytes of a block]"""
        return self._rows.numpy().view(np.uint8)

    def begin(self, step: int, transfers: BlockTransfers | None) -> None:
        """Launch the copies of a step, before the step itself."""
        compute = torch.cuda.current_stream(self._device)
        if self._last is not None:
            compute.wait_event(self._last)
            self._last = None
        if transfers is None:
            return
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            self._launch(transfers)
            done = torch.cuda.Event()
            done.record(self._stream)
        if transfers.is_urgent:
            compute.wait_event(done)
        else:
            self._last = done
        self._events.append((step, done))
        self._launched.set(step)

    def _compile(self, num_blocks: int) -> None:
        """Copy the block for padding out and in: no request waits for a compiler."""
        padding, place = np.array([num_blocks - 1]), np.array([0])
        with torch.cuda.stream(self._stream):
            self._launch(BlockTransfers(padding, place, place, padding, is_urgent=False))
        self._stream.synchronize()

    def _launch(self, transfers: BlockTransfers) -> None:
        numbers = (transfers.out_blocks, transfers.out_places, transfers.in_blocks, transfers.in_places)
        out_blocks, out_places, in_blocks, in_places = self._sent(numbers)
        sizes = (self._addresses, self._side_words)
        block_transfer.copy_blocks_to_rows(*sizes, out_blocks, self._rows, out_places)
        block_transfer.copy_rows_to_blocks(*sizes, in_blocks, self._rows, in_places)

    def _sent(self, arrays: tuple[IntArray, ...]) -> tuple[torch.Tensor, ...]:
        """Arrays on the device, sent with one copy on the current stream."""
        joined = torch.from_numpy(np.concatenate(arrays)).pin_memory().to(self._device, non_blocking=True)
        return tuple(torch.split(joined, [len(array) for array in arrays]))

    def wait(self, step: int, seconds: float) -> bool:
        """Wait until the copies of this step and of all before it are done; returns whether they are. From any
        thread."""
        if not self._launched.wait(step, seconds):
            return False
        after = next((event for number, event in list(self._events) if number >= step), None)
        if after is not None:
            after.synchronize()
        return True

    def close(self) -> None:
        """Free the memory, unless somebody still has a view of it. No copy may be running."""
        del self._rows
