"""Linear layers: which class multiplies a weight, and what it computes besides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.gpu.few_rows import GATED, FewRowsLinear, Linear, has_whole_tiles
from headrace.kernels.gpu.fp8 import quantize_rows
from headrace.kernels.gpu.fp8_linear import Fp8Linear, can_multiply
from headrace.kernels.gpu.int4 import Int4Linear
from headrace.kernels.gpu.scaled_gemm import ScaledLinear
from headrace.kernels.layout import Rows, UnnormedRows, num_rows_of
from headrace.kernels.quantized import Int8Weight, quantize_int8

_ROWS_AT_ONCE = 1 << 14  # of a matrix that is quantized, so that its float32 copy is small


@dataclass(frozen=True, slots=True)
class LinearWithCopy:
    """A matrix of a quantized model that keeps its 16 bits, such as the LM head. Up to 16 rows are multiplied by a copy
    in INT8, whose bytes are what such a step waits for, and are not rounded themselves; more rows by the matrix."""

    plain: Linear
    int8: ScaledLinear

    def prefers_fp8(self, num_rows: int) -> bool:
        return False

    def __call__(self, x: Rows) -> Tensor:  # [T, K] -> [T, N]
        return self.int8(x) if self.int8.takes_few_rows(num_rows_of(x)) else self.plain(x)


def pack_with_copy(weight: Tensor, bias: Tensor | None) -> tuple[Linear | LinearWithCopy, int]:
    """See `ops.pack_with_copy`. There is no copy if the kernels for few rows do not take the shape."""
    plain = Linear.of(weight, bias)
    if not has_whole_tiles(weight):
        return plain, 0
    int8 = _in_int8(weight)
    return LinearWithCopy(plain, ScaledLinear.of(int8, bias, weight.dtype)), int8.values.nbytes + int8.scales.nbytes


def _in_int8(weight: Tensor) -> Int8Weight:
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty((weight.shape[0], 1), dtype=torch.float32, device=weight.device)
    for start in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        chunk = quantize_int8(weight[rows])
        values[rows], scales[rows] = chunk.values, chunk.scales
    return Int8Weight(values, scales)


def pack_linear(weight: Tensor, bias: Tensor | None = None, *, as_fp8: bool = False) -> Linear | Fp8Linear:
    """Quantizes the weight if asked, unless a side is no multiple of 16, which the GEMM requires."""
    if as_fp8 and can_multiply(weight.shape):
        return Fp8Linear.of(quantize_rows(weight), bias, weight.dtype)
    return Linear.of(weight, bias)


def takes_unnormed(linear: object, x: Tensor) -> bool:
    """See `ops.takes_unnormed`."""
    return isinstance(linear, FewRowsLinear | Int4Linear) and linear.takes_unnormed(x)


def fuses_gate(linear: object, activation: str) -> bool:
    return isinstance(linear, FewRowsLinear | Int4Linear) and activation in GATED


def gated_linear(linear: FewRowsLinear | Int4Linear, x: Tensor | UnnormedRows, activation: str) -> Tensor:
    """See `ops.gated_linear`."""
    return linear.gated(x, activation)
