"""The settings of all slots: arrays on the host, written when a sequence enters a slot, and tensors on the device.

On a CPU both are the same memory. Elsewhere the changed slots are sent together, before the next step reads them.
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
    """Owns the columns of all features. `tensors` are the device's; rare columns exist once a slot has used them."""

    def __init__(
        self, columns: Sequence[Column], *, num_slots: int, device: torch.device, shares_memory: bool | None = None
    ) -> None:
        self._columns = {column.name: column for column in columns}
        self._num_slots = num_slots
        self._device = device
        self._shares_memory = device.type == "cpu" if shares_memory is None else shares_memory
        self._host: dict[str, npt.NDArray[Any]] = {}
        self.tensors: dict[str, Tensor] = {}
        self._set: dict[str, set[int]] = {name: set() for name in self._columns}  # slots with a value of their own
        self._changed: dict[str, set[int]] = {}  # slots that were written and not yet sent
        for column in self._columns.values():
            if not column.is_rare:
                self._allocate(column)

    def host(self, name: str) -> npt.NDArray[Any]:
        return self._host[name]

    def write(self, slot: int, settings: Mapping[str, Any]) -> None:
        """Gives a slot these settings, and the defaults of all other columns."""
        for name, column in self._columns.items():
            if name in settings:
                if name not in self._host:
                    self._allocate(column)
                self._host[name][slot] = settings[name]
                self._set[name].add(slot)
            elif slot in self._set[name]:
                self._host[name][slot] = column.default
                self._set[name].discard(slot)
            else:
                continue
            self._changed.setdefault(name, set()).add(slot)

    def send(self) -> None:
        """Sends what was written to the device."""
        for name, changed in self._changed.items() if not self._shares_memory else ():
            slots = np.fromiter(changed, np.int64)
            self.tensors[name].index_copy_(0, sent(slots, self._device), sent(self._host[name][slots], self._device))
        self._changed.clear()

    def _allocate(self, column: Column) -> None:
        values = _filled(column, self._num_slots)
        self._host[column.name] = values
        self.tensors[column.name] = torch.from_numpy(values if self._shares_memory else values.copy()).to(self._device)


def sent(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Starts the copy to the device; from pinned memory, so that the host does not wait."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _filled(column: Column, num_slots: int) -> npt.NDArray[Any]:
    shape = (num_slots,) if column.width is None else (num_slots, column.width)
    return np.full(shape, column.default, dtype=column.dtype)
