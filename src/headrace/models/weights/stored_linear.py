"""The matrices of one linear layer as a quantized checkpoint stores them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.kernels.quantized import QuantizedWeight, concatenate, take_rows
from headrace.models.weights.source import ShardedSource

RowOrder = Callable[[str, int], Tensor | None]  # name and number of rows -> [rows] int64 on the host; None: as stored


def read_stored(
    source: ShardedSource, names: tuple[str, ...], device: torch.device, row_order: RowOrder
) -> QuantizedWeight | None:
    """Returns matrices that share their input as one, their rows concatenated; None: the checkpoint does not store them
    quantized, or they have no common form."""
    found = []
    for name in names:
        weight = _in_order(source.quantized(name, device), name, row_order)
        if weight is None:
            return None
        found.append(weight)
    return concatenate(found)


def _in_order(weight: QuantizedWeight | None, name: str, row_order: RowOrder) -> QuantizedWeight | None:
    order = None if weight is None else row_order(name, weight.values.shape[0])
    return weight if weight is None or order is None else take_rows(weight, order)
