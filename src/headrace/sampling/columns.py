"""The rows' settings: arrays of the host, written at admission, and the tensors on the device that a step reads.

On a CPU both are the same memory. Elsewhere the rows that changed are sent together, before the next step reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.sampling.feature import Column


class Columns:
    """Owns the columns of all features. `tensors` are the device's."""

    def __init__(
        self, columns: Sequence[Column], *, max_rows: int, device: torch.device, shares_memory: bool | None = None
    ) -> None:
        self._defaults = {column.name: column.default for column in columns}
        self._host = {column.name: _filled(column, max_rows) for column in columns}
        self._shares_memory = device.type == "cpu" if shares_memory is None else shares_memory
        self._changed: set[int] = set()
        self.tensors: dict[str, Tensor] = {
            name: torch.from_numpy(values if self._shares_memory else values.copy()).to(device)
            for name, values in self._host.items()
        }

    def host(self, name: str) -> npt.NDArray[Any]:
        return self._host[name]

    def write(self, row: int, settings: Mapping[str, Any]) -> None:
        """Gives a row these settings, and the default wherever they have none."""
        for name, values in self._host.items():
            values[row] = settings.get(name, self._defaults[name])
        self._changed.add(row)

    def send(self) -> None:
        """Brings what was written to the device."""
        if self._changed and not self._shares_memory:
            rows = np.fromiter(self._changed, np.int64)
            for name, tensor in self.tensors.items():
                tensor.index_copy_(0, _sent(rows, tensor.device), _sent(self._host[name][rows], tensor.device))
        self._changed.clear()


def _sent(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """On its way to the device: from pinned memory, so that nobody waits."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _filled(column: Column, max_rows: int) -> npt.NDArray[Any]:
    shape = (max_rows,) if column.width is None else (max_rows, column.width)
    return np.full(shape, column.default, dtype=column.dtype)
