"""Linear layers and the table of embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.layout import Rows, UnnormedRows
from headrace.kernels.quantized import QuantizedWeight, dequantize
from headrace.kernels.reference.fp8 import quantize_rows


class PackedLinear:
    """A weight matrix and its bias; other devices pack them into the form that they multiply fastest."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight  # [N, K]
        self._bias = bias  # [N]

    def prefers_fp8(self, num_rows: int) -> bool:
        return False

    def __call__(self, x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        return F.linear(x, self._weight, self._bias)


class Fp8Linear:
    """FP8 weights with one scale per output channel, times FP8 activations with one scale per row."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = quantize_rows(weight)  # [N, K]
        self._bias = bias
        self._dtype = weight.dtype

    def prefers_fp8(self, num_rows: int) -> bool:
        return True

    def __call__(self, x: Rows) -> Tensor:  # [T, K] -> [T, N]
        assert not isinstance(x, UnnormedRows)
        rows = quantize_rows(x) if isinstance(x, Tensor) else x
        out = (rows.values.float() @ self._weight.values.float().t()) * rows.scales * self._weight.scales.t()
        return (out if self._bias is None else out + self._bias.float()).to(self._dtype)


def pack_linear(weight: Tensor, bias: Tensor | None = None, *, as_fp8: bool = False) -> PackedLinear | Fp8Linear:
    """See `ops.pack_linear`."""
    return Fp8Linear(weight, bias) if as_fp8 else PackedLinear(weight, bias)


def takes_groups() -> bool:
    """See `ops.takes_groups`."""
    return False


def pack_quantized(weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> PackedLinear:
    """See `ops.pack_quantized`. Dequantizes."""
    return PackedLinear(dequantize(weight).to(dtype), bias)


def embed(token_ids: Tensor, table: Tensor) -> Tensor:  # [T], [V, H] -> [T, H]
    return table.index_select(0, token_ids)
