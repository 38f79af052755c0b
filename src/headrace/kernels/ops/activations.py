"""Activations of MLPs, alone or multiplied by a second half."""

from __future__ import annotations

from torch import Tensor

from headrace.kernels.layout import Rows
from headrace.kernels.ops.dispatch import kernels_for


def silu_and_mul(gate_up: Tensor, *, as_fp8: bool = False) -> Rows:  # [T, 2 * I] -> [T, I], silu(first) * second half
    kernels = kernels_for(gate_up.device, gate_up.dtype)
    out: Rows = kernels.silu_and_mul_fp8(gate_up) if as_fp8 else kernels.silu_and_mul(gate_up)
    return out


def gelu_tanh_and_mul(gate_up: Tensor, *, as_fp8: bool = False) -> Rows:  # [T, 2 * I] -> [T, I], gelu(first) * second
    """Uses the tanh approximation of GELU."""
    kernels = kernels_for(gate_up.device, gate_up.dtype)
    out: Rows = kernels.gelu_tanh_and_mul_fp8(gate_up) if as_fp8 else kernels.gelu_tanh_and_mul(gate_up)
    return out


def gelu_and_mul(gate_up: Tensor, *, as_fp8: bool = False) -> Rows:  # [T, 2 * I] -> [T, I], gelu(first) * second
    """Uses the exact GELU. Only encoders have it, and these are not quantized."""
    assert not as_fp8
    out: Tensor = kernels_for(gate_up.device, gate_up.dtype).gelu_and_mul(gate_up)
    return out


def clamped_silu_and_mul(gate_up: Tensor, *, as_fp8: bool = False) -> Rows:  # [T, 2 * I] -> [T, I]
    """Computes gate * sigmoid(1.702 * gate) * (up + 1), with gate up to 7 and up between -7 and 7."""
    kernels = kernels_for(gate_up.device, gate_up.dtype)
    out: Rows = kernels.clamped_silu_and_mul_fp8(gate_up) if as_fp8 else kernels.clamped_silu_and_mul(gate_up)
    return out


GATED = {  # activations of a gate, multiplied by up
    "silu": silu_and_mul,
    "clamped_silu": clamped_silu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
    "gelu": gelu_and_mul,
}


def gelu(x: Tensor, *, as_fp8: bool = False) -> Rows:  # [T, I]
    """Computes the exact GELU."""
    kernels = kernels_for(x.device, x.dtype)
    out: Rows = kernels.gelu_fp8(x) if as_fp8 else kernels.gelu(x)
    return out


def gelu_tanh(x: Tensor, *, as_fp8: bool = False) -> Rows:  # [T, I]
    kernels = kernels_for(x.device, x.dtype)
    out: Rows = kernels.gelu_tanh_fp8(x) if as_fp8 else kernels.gelu_tanh(x)
    return out


def relu(x: Tensor, *, as_fp8: bool = False) -> Rows:  # [T, I]
    kernels = kernels_for(x.device, x.dtype)
    out: Rows = kernels.relu_fp8(x) if as_fp8 else kernels.relu(x)
    return out


def relu2(x: Tensor, *, as_fp8: bool = False) -> Rows:  # [T, I]
    """Computes the square of ReLU."""
    kernels = kernels_for(x.device, x.dtype)
    out: Rows = kernels.relu2_fp8(x) if as_fp8 else kernels.relu2(x)
    return out
