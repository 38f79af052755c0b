"""Packs quantized weights into the form that a GPU multiplies fastest."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.gpu.few_rows import Linear
from headrace.kernels.gpu.fp8_linear import Fp8Linear, can_multiply
from headrace.kernels.gpu.int4 import Int4Linear
from headrace.kernels.gpu.int4_values import can_pack
from headrace.kernels.gpu.scaled_gemm import ScaledLinear
from headrace.kernels.layout import Fp8Rows
from headrace.kernels.quantized import Fp8Weight, Int4Weight, Int8Weight, QuantizedWeight, dequantize

_FP8_CAPABILITY = (8, 9)


def pack_quantized(
    weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype
) -> Linear | Fp8Linear | Int4Linear | ScaledLinear:
    """Keeps the weights in four or eight bits, or widens them where no kernel takes them."""
    if isinstance(weight, Int4Weight) and can_pack(weight):
        return Int4Linear(weight, bias, dtype)
    if isinstance(weight, Int8Weight) and weight.values.shape[1] % 16 == 0:
        return ScaledLinear.of(weight, bias, dtype)
    if isinstance(weight, Fp8Weight) and weight.has_blocks and _has_fp8(weight.values.device):
        return ScaledLinear.of(weight, bias, dtype)
    if isinstance(weight, Fp8Weight) and can_multiply(weight.values.shape) and _has_fp8(weight.values.device):
        return Fp8Linear.of(Fp8Rows(weight.values, weight.scales), bias, dtype)
    return Linear.of(dequantize(weight).to(dtype), bias)


def _has_fp8(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY
