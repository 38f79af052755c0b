"""Linear layers, their low-rank adapters, and the table of embeddings."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headrace.kernels import reference
from headrace.kernels.layout import AdapterRows, LowRankWeights, Rows, UnnormedRows
from headrace.kernels.ops.activations import GATED
from headrace.kernels.ops.dispatch import kernels_for
from headrace.kernels.quantized import QuantizedWeight


class PackedLinear(Protocol):
    """A weight matrix and its bias in the form that their device multiplies fastest."""

    def prefers_fp8(self, num_rows: int) -> bool: ...  # whether so many rows should come in FP8

    def __call__(self, x: Rows) -> Tensor: ...  # [T, K] -> [T, N]


def pack_linear(weight: Tensor, bias: Tensor | None = None, *, as_fp8: bool = False) -> PackedLinear:  # [N, K], [N]
    """Packs a weight matrix [N, K]. `as_fp8`: FP8 weights and activations (see `gpu/fp8.py`); only on a GPU."""
    kernels = kernels_for(weight.device, weight.dtype)
    packed: PackedLinear = (
        kernels.pack_linear(weight, bias, as_fp8=True) if as_fp8 else kernels.pack_linear(weight, bias)
    )
    return packed


def pack_quantized(weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> PackedLinear:
    """Packs a quantized weight matrix for activations of this type. What a device cannot multiply, such as FP8 on a
    CPU, is dequantized."""
    packed: PackedLinear = kernels_for(weight.values.device, dtype).pack_quantized(weight, bias, dtype)
    return packed


def takes_groups(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device multiplies a `GroupedWeight` as it is."""
    if device.type != "cpu":
        return False
    found: bool = kernels_for(device, dtype).takes_groups()
    return found


def pack_with_copy(weight: Tensor, bias: Tensor | None) -> tuple[PackedLinear, int]:  # [N, K], [N]
    """Packs a matrix of a quantized model that keeps its 16 bits. On a GPU it has a copy in INT8 for steps of few
    sequences. Also returns the bytes of that copy."""
    if weight.device.type != "cuda":
        return pack_linear(weight, bias), 0
    packed: tuple[PackedLinear, int] = kernels_for(weight.device, weight.dtype).pack_with_copy(weight, bias)
    return packed


def takes_unnormed(linear: PackedLinear, x: Tensor) -> bool:
    """Whether the layer computes the RMS norm before it as well, for rows of this shape: it then takes
    `UnnormedRows`."""
    if x.device.type != "cuda":
        return False
    found: bool = kernels_for(x.device, x.dtype).takes_unnormed(linear, x)
    return found


def gated_linear(linear: PackedLinear, x: Rows, activation: str, *, as_fp8: bool = False) -> Rows:
    """Multiplies by gate and up, the halves of the layer's output, then applies the activation to the gate and
    multiplies it by up. [T, K] -> [T, N / 2]"""
    if not as_fp8 and isinstance(x, Tensor | UnnormedRows):
        rows = x if isinstance(x, Tensor) else x.x
        kernels = kernels_for(rows.device, rows.dtype)
        if rows.device.type == "cuda" and kernels.fuses_gate(linear, activation):
            out: Tensor = kernels.gated_linear(linear, x, activation)
            return out
    return GATED[activation](linear(x), as_fp8=as_fp8)


def add_low_rank(out: Tensor, x: Tensor, weights: LowRankWeights, rows: AdapterRows) -> None:  # [T, N], [T, K]
    """Adds the low-rank product of each row's adapter to the output of a linear layer with the input x."""
    kernels_for(x.device, x.dtype).add_low_rank(out, x, weights, rows)


def embed(token_ids: Tensor, table: Tensor) -> Tensor:  # [T], [V, H] -> [T, H]
    if table.device.type != "cuda":
        return reference.embed(token_ids, table)
    out: Tensor = kernels_for(table.device, table.dtype).embed(token_ids, table)
    return out
