"""RMS and layer norms, alone or with the sum before them, and that sum alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.layout import Fp8Rows
from headrace.kernels.reference.fp8 import quantize_rows


def add_to(residual: Tensor, x: Tensor) -> Tensor:
    """Adds x to `residual` in place and returns it. Both [T, H]."""
    return residual.add_(x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [..., H], [H] -> [..., H]
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x to `residual` in place and returns the norm of the sum. All [T, H]."""
    residual += x
    return rms_norm(residual, weight, eps)


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
    return quantize_rows(rms_norm(x, weight, eps))


def add_rms_norm_fp8(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
    return quantize_rows(add_rms_norm(x, residual, weight, eps))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:  # [..., H], [H], [H] -> [..., H]
    return F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps).to(x.dtype)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Adds x to `residual` in place and returns the norm of the sum. All [T, H]."""
    residual += x
    return layer_norm(residual, weight, bias, eps)


def layer_norm_fp8(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Fp8Rows:
    return quantize_rows(layer_norm(x, weight, bias, eps))


def add_layer_norm_fp8(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Fp8Rows:
    return quantize_rows(add_layer_norm(x, residual, weight, bias, eps))
