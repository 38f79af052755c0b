"""The memory of the host tier (`kv/tiers.py`) beside a cache that is in the host's memory too: plain copies."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels import reference
from headrace.kernels.layout import LayerCache
from headrace.steps import BlockTransfers


class HostBlocks:
    """Owns the rows of the host tier, one for each place: the block's words of all layers. The memory is taken as it is
    used."""

    def __init__(self, caches: list[LayerCache], num_places: int) -> None:
        self._sides = [side for cache in caches for side in cache.raw_sides]
        self._rows = torch.empty(num_places, sum(side.shape[1] for side in self._sides), dtype=torch.int64)
        self._done = LastStep()

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """[num_places, bytes of a block]"""
        return self._rows.numpy().view(np.uint8)

    def transfer(self, step: int, transfers: BlockTransfers) -> None:
        """Make the copies of a step. They are done before it computes."""
        if len(transfers.out_blocks):
            blocks, places = torch.from_numpy(transfers.out_blocks), torch.from_numpy(transfers.out_places)
            reference.copy_blocks_to_rows(self._sides, blocks, self._rows, places)
        if len(transfers.in_blocks):
            blocks, places = torch.from_numpy(transfers.in_blocks), torch.from_numpy(transfers.in_places)
            reference.copy_rows_to_blocks(self._sides, blocks, self._rows, places)
        self._done.set(step)

    def wait(self, step: int, seconds: float) -> bool:
        """Wait until the copies of this step and of all before it are done; returns whether they are. From any
        thread."""
        return self._done.wait(step, seconds)


class LastStep:
    """The last step that has come so far, for threads that wait for it."""

    def __init__(self) -> None:
        self._step = -1
        self._condition = threading.Condition()

    def set(self, step: int) -> None:
        with self._condition:
            self._step = step
            self._condition.notify_all()

    def wait(self, step: int, seconds: float) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: self._step >= step, seconds)
