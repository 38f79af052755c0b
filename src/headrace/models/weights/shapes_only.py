"""Weights of which only the shapes are known, for a start that computes nothing (`runner/gpu/meta_gpu.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.quantized import BLOCK_LEN, FP8, Fp8Weight, Int4Weight, Int8Weight, QuantizedWeight
from headrace.models.spec import ModelSpec
from headrace.models.weights.no_files import WeightsWithoutFiles
from headrace.models.weights.source import Slice

_GROUP_LEN = 128  # of four-bit weights that share a scale, in nearly all checkpoints
_LAYERS = "model.layers."


class ShapesOnly(WeightsWithoutFiles):
    """A `WeightSource` that fills nothing. Matrices that the checkpoint stores quantized come in that form."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._quantization = spec.quantization

    def fill(self, name: str, out: Tensor, part: Slice | None = None) -> None:
        """Leaves `out` as it is."""

    def quantized(self, name: str, device: torch.device, part: Slice | None = None) -> QuantizedWeight | None:
        stored = self._quantization
        if stored is None or not stored.stays_packed or not name.startswith(_LAYERS) or len(self._shapes[name]) != 2:
            return None
        rows, width = (
            self._shapes[name] if part is None else part.of(torch.empty(self._shapes[name], device="meta")).shape
        )
        if stored.kind == "int8":
            values = torch.empty(rows, width, dtype=torch.int8, device=device)
            return Int8Weight(values, torch.empty(rows, 1, device=device))
        if stored.kind == "fp8":
            has_blocks = stored.method == "fp8"
            sizes = (-(-rows // BLOCK_LEN), -(-width // BLOCK_LEN)) if has_blocks else (rows, 1)
            return Fp8Weight(torch.empty(rows, width, dtype=FP8, device=device), torch.empty(sizes, device=device))
        sizes = (rows, width // _GROUP_LEN)
        has_zeros = stored.method in ("awq", "gptq")
        zeros = torch.empty(sizes, dtype=torch.uint8, device=device) if has_zeros else None
        values = torch.empty(rows, width, dtype=torch.uint8, device=device)
        return Int4Weight(values, torch.empty(sizes, device=device), zeros)
