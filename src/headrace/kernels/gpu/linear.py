"""Linear layers: which class multiplies a weight, and what it computes besides."""

from __future__ import annotations

from torch import Tensor

from headrace.kernels.gpu.few_rows import GATED, FewRowsLinear, Linear
from headrace.kernels.gpu.fp8 import quantize_rows
from headrace.kernels.gpu.fp8_linear import Fp8Linear, can_multiply
from headrace.kernels.gpu.int4 import Int4Linear
from headrace.kernels.layout import UnnormedRows


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
