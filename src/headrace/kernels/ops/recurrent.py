"""Layers with a recurrent state in each slot."""

from __future__ import annotations

from torch import Tensor

from headrace.kernels.layout import StepLayout
from headrace.kernels.ops.dispatch import kernels_for


def causal_conv(
    x: Tensor,  # [T, C]
    layout: StepLayout,
    state: Tensor,  # [num_slots, K - 1, C]
    weight: Tensor,  # [C, K]
    bias: Tensor | None = None,  # [C]
    *,
    activates: bool,
) -> Tensor:  # [T, C]
    """Convolves each channel over the last K tokens of its sequence; `activates`: with SiLU after it. Reads and updates
    the state of each slot."""
    kernels = kernels_for(x.device, x.dtype)
    out: Tensor = kernels.causal_conv(x, layout, state, weight, bias, activates=activates)
    return out


def selective_scan(
    x: Tensor,  # [T, H, P]
    b: Tensor,  # [T, G, N]
    c: Tensor,  # [T, G, N]
    dt: Tensor,  # [T, H]
    layout: StepLayout,
    state: Tensor,  # [num_slots, H, P, N] float32
    *,
    rate: Tensor,  # [H] float32, negative
    skip: Tensor,  # [H] float32
    dt_bias: Tensor,  # [H] float32
) -> Tensor:  # [T, H, P]
    """Computes the state space of Mamba 2 and updates the state of each slot. With d = softplus(dt + dt_bias), a token
    makes the state M of its head exp(d * rate) * M + d * x b', and reads M c + skip * x."""
    kernels = kernels_for(x.device, x.dtype)
    out: Tensor = kernels.selective_scan(x, b, c, dt, layout, state, rate=rate, skip=skip, dt_bias=dt_bias)
    return out


def gated_delta_rule(
    q: Tensor,  # [T, Hk, K]
    k: Tensor,  # [T, Hk, K]
    v: Tensor,  # [T, H, V]
    a: Tensor,  # [T, H]
    b: Tensor,  # [T, H]
    layout: StepLayout,
    state: Tensor,  # [num_slots, H, K, V] float32
    *,
    rate: Tensor,  # [H] float32, negative
    dt_bias: Tensor,  # [H] float32
) -> Tensor:  # [T, H, V]
    """Computes linear attention by the gated delta rule and updates the state of each slot. Keys and queries are scaled
    to unit length. A token makes the state M of its head D = exp(rate * softplus(a + dt_bias)) * M, then D +
    sigmoid(b) * k (v - k' D)', and reads q' M / sqrt(K)."""
    kernels = kernels_for(v.device, v.dtype)
    out: Tensor = kernels.gated_delta_rule(q, k, v, a, b, layout, state, rate=rate, dt_bias=dt_bias)
    return out


def gated_norm(
    x: Tensor,  # [T, I]
    gate: Tensor,  # [T, I]
    weight: Tensor | None,  # [I], or [group_size] for all groups; None: no norm, only the gate
    eps: float,
    *,
    group_size: int,
    norm_first: bool,
) -> Tensor:  # [T, I]
    """Multiplies by SiLU of the gate, and applies the RMS norm of each group of columns before that (`norm_first`) or
    after it."""
    kernels = kernels_for(x.device, x.dtype)
    out: Tensor = kernels.gated_norm(x, gate, weight, eps, group_size=group_size, norm_first=norm_first)
    return out
