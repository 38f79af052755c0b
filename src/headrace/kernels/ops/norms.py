"""RMS and layer norms, alone or with the sum before them, and that sum alone."""

from __future__ import annotations

from torch import Tensor

from headrace.kernels.layout import Addend, Rows
from headrace.kernels.ops.dispatch import kernels_for
from headrace.kernels.ops.experts import sum_routes


def add_to(residual: Tensor, x: Addend) -> Tensor:
    """Adds x to `residual` in place and returns it. Both [T, H]."""
    total: Tensor = kernels_for(residual.device, residual.dtype).add_to(residual, sum_routes(x))
    return total


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, as_fp8: bool = False) -> Rows:  # [T, H], [H] -> [T, H]
    kernels = kernels_for(x.device, x.dtype)
    out: Rows = kernels.rms_norm_fp8(x, weight, eps) if as_fp8 else kernels.rms_norm(x, weight, eps)
    return out


def add_rms_norm(x: Addend, residual: Tensor, weight: Tensor, eps: float, *, as_fp8: bool = False) -> Rows:
    """Adds x to `residual` in place and returns the norm of the sum. All [T, H]."""
    kernels = kernels_for(residual.device, residual.dtype)
    norm = kernels.add_rms_norm_fp8 if as_fp8 else kernels.add_rms_norm
    out: Rows = norm(_in_one_launch(x, residual), residual, weight, eps)
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, as_fp8: bool = False) -> Rows:
    kernels = kernels_for(x.device, x.dtype)
    norm = kernels.layer_norm_fp8 if as_fp8 else kernels.layer_norm
    out: Rows = norm(x, weight, bias, eps)
    return out


def add_layer_norm(
    x: Addend, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, *, as_fp8: bool = False
) -> Rows:
    """Adds x to `residual` in place and returns the norm of the sum. All [T, H]."""
    kernels = kernels_for(residual.device, residual.dtype)
    norm = kernels.add_layer_norm_fp8 if as_fp8 else kernels.add_layer_norm
    out: Rows = norm(_in_one_launch(x, residual), residual, weight, bias, eps)
    return out


def _in_one_launch(x: Addend, residual: Tensor) -> Addend:
    """The norms of a GPU sum the routes of each token as well."""
    return x if residual.device.type == "cuda" else sum_routes(x)
