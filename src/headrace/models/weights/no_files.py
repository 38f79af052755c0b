"""What weights that come from no file have in common."""

from __future__ import annotations

from collections.abc import Collection

import torch

from headrace.kernels.quantized import QuantizedWeight
from headrace.models.spec import ModelSpec, Shape
from headrace.models.weights.source import Slice, StoredRows


class WeightsWithoutFiles:
    """The part of a `WeightSource` that tells names and shapes, and that nothing is stored."""

    def __init__(self, spec: ModelSpec) -> None:
        self._shapes = spec.tensor_shapes()

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> Shape:
        return self._shapes[name]

    @property
    def num_bytes_read(self) -> int:
        return 0

    @property
    def file_reader(self) -> None:
        return None

    def stored_rows(self, name: str, part: Slice | None = None) -> StoredRows | None:
        return None

    def quantized(self, name: str, device: torch.device, part: Slice | None = None) -> QuantizedWeight | None:
        return None
