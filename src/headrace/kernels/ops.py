"""The operations that a model calls. Each uses the fast kernel of the tensor's device, or else the PyTorch
reference."""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType
from typing import Protocol, cast

import torch
from torch import Tensor

from headrace.kernels import reference
from headrace.kernels.layout import (
    AdapterRows,
    Fp8Rows,
    LayerCache,
    LayerState,
    LowRankWeights,
    PackedLayout,
    Routes,
    Rows,
    StepLayout,
    UnnormedRows,
)
from headrace.kernels.quantized import QuantizedWeight
from headrace.kernels.ranges import RangedKernels, Ranges
from headrace.startup import OnStage, ignore_stage

__all__ = [
    "GATED",
    "AdapterRows",
    "Fp8Rows",
    "LayerCache",
    "LayerState",
    "LowRankWeights",
    "PackedExperts",
    "PackedLinear",
    "Routes",
    "Rows",
    "StepLayout",
    "UnnormedRows",
    "add_layer_norm",
    "add_low_rank",
    "add_rms_norm",
    "allocate_cache",
    "allocate_latent_cache",
    "apply_bitmask",
    "bidirectional_attention",
    "causal_conv",
    "clamped_silu_and_mul",
    "copy_blocks",
    "embed",
    "experts_of_few_tokens",
    "gated_delta_rule",
    "gated_experts",
    "gated_linear",
    "gated_norm",
    "gelu",
    "gelu_and_mul",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "latent_attention",
    "layer_norm",
    "pack_experts",
    "pack_linear",
    "pack_quantized",
    "paged_attention",
    "record_ranges",
    "relu",
    "relu2",
    "rms_norm",
    "rope_and_store",
    "rope_and_store_latent",
    "rotate",
    "route",
    "selective_scan",
    "silu_and_mul",
    "soft_cap",
    "sum_routes",
    "takes_few_tokens",
    "takes_unnormed",
    "warm_up",
]


class PackedLinear(Protocol):
    """A weight matrix and its bias in the form that their device multiplies fastest."""

    @property
    def takes_fp8(self) -> bool: ...  # whether the operation before it should return FP8 rows

    def __call__(self, x: Rows) -> Tensor: ...  # [T, K] -> [T, N]


class PackedExperts(Protocol):
    """One weight matrix per expert, in the form that their device multiplies fastest."""

    @property
    def takes_fp8(self) -> bool: ...

    def __call__(self, x: Rows, routes: Routes, *, weighs: bool = False) -> Tensor:  # [T or R, K] -> [R, N]
        """Multiplies each route's row, or its token's row, by the matrix of its expert; then by the route's weight
        if asked."""


def warm_up(device: torch.device, dtype: torch.dtype, on_stage: OnStage = ignore_stage) -> None:
    """Compiles or loads what steps of this type need, so that no step waits for it."""
    if device.type == "cpu" and dtype == torch.float32 and has_numba():
        from headrace.kernels import cpu

        cpu.warm_up(on_stage)


def pack_linear(weight: Tensor, bias: Tensor | None = None, *, as_fp8: bool = False) -> PackedLinear:  # [N, K], [N]
    """Packs a weight matrix [N, K]. `as_fp8`: FP8 weights and activations (see `gpu/fp8.py`); only on a GPU."""
    kernels = kernels_for(weight.device, weight.dtype)
    packed: PackedLinear = (
        kernels.pack_linear(weight, bias, as_fp8=True) if as_fp8 else kernels.pack_linear(weight, bias)
    )
    return packed


def pack_quantized(weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> PackedLinear:
    """Packs a quantized weight matrix for activations of this type. A GPU keeps it in four or eight bits, a CPU in
    INT8; what a device cannot multiply is dequantized."""
    packed: PackedLinear = kernels_for(weight.values.device, dtype).pack_quantized(weight, bias, dtype)
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


def pack_experts(weight: Tensor, *, as_fp8: bool = False) -> PackedExperts:  # [E, N, K]
    """Packs the weight matrices of a mixture of experts."""
    kernels = kernels_for(weight.device, weight.dtype)
    packed: PackedExperts = kernels.pack_experts(weight, as_fp8=True) if as_fp8 else kernels.pack_experts(weight)
    return packed


def gated_experts(up: PackedExperts, x: Tensor, routes: Routes, activation: str) -> Rows:  # [T, K] -> [R, N / 2]
    """Multiplies each route's token by gate and up of its expert, and applies the activation, in the type that a second
    layer of the same kind takes."""
    if x.device.type == "cuda" and not up.takes_fp8 and activation in ("silu", "gelu_tanh"):
        out: Tensor = kernels_for(x.device, x.dtype).gated_experts(up, x, routes, activation)
        return out
    return GATED[activation](up(x, routes), as_fp8=up.takes_fp8)


def sum_routes(x: Tensor, num_chosen: int) -> Tensor:  # [T * num_chosen, H] -> [T, H]
    """Sums the routes of each token."""
    if x.device.type == "cuda":
        out: Tensor = kernels_for(x.device, x.dtype).sum_routes(x, num_chosen)
        return out
    return x.view(-1, num_chosen, x.shape[1]).sum(1)


def takes_few_tokens(up: PackedExperts, down: PackedExperts, x: Tensor, activation: str) -> bool:
    """Whether `experts_of_few_tokens` computes these experts for rows of this shape."""
    if x.device.type != "cuda":
        return False
    found: bool = kernels_for(x.device, x.dtype).takes_few_tokens(up, down, x, activation)
    return found


def experts_of_few_tokens(
    up: PackedExperts, down: PackedExperts, x: Tensor, routes: Routes, activation: str
) -> Tensor:  # [T, H] -> [T, H]
    """Computes the whole MLP of each route's expert, and sums the weighted results of each token."""
    out: Tensor = kernels_for(x.device, x.dtype).experts_of_few_tokens(up, down, x, routes, activation)
    return out


def route(
    logits: Tensor,  # [T, E]
    num_chosen: int,
    rule: str,
    *,
    correction: Tensor | None = None,  # [E] float32
    scale: float = 1.0,
    jitter: float = 0.0,
    num_groups: int = 1,
    num_groups_chosen: int = 1,
    sorts: bool = True,  # False: `order` and `ends` of the routes may be left empty
) -> Routes:
    """Routes each token to the `num_chosen` experts of its highest logits; with a `correction`, to those of the highest
    scores (sigmoid or softmax of the logits) plus correction. Experts in groups: only those of the groups with the
    highest logit, or with the highest sum of two corrected scores.

    The `rule` gives the routes' weights, which are multiplied by `scale`: the sigmoid of each logit, or its share among
    the chosen ones (sigmoid_of_chosen); its share in the softmax over all experts (softmax), over the chosen ones
    (softmax_of_chosen), or over those not chosen before it whose logits are within 2 * `jitter` of it, relative to the
    larger of the two (sparsemixer)."""
    route = kernels_for(logits.device, logits.dtype).route
    groups = {"num_groups": num_groups, "num_groups_chosen": num_groups_chosen}
    if not sorts:
        groups["sorts"] = False
    routes: Routes = route(logits, num_chosen, rule, correction=correction, scale=scale, jitter=jitter, **groups)
    return routes


def allocate_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """Allocates one layer's cache, [num_blocks, Hkv, block_size, D] twice; on a CPU memory is committed only as it
    is used."""
    kernels = kernels_for(device, dtype)
    cache: LayerCache = kernels.allocate_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype, device)
    return cache


def allocate_latent_cache(
    num_blocks: int, block_size: int, rank: int, rotary_dim: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """Allocates one layer's cache of multi-head latent attention: for each token its latent and the rotated part of its
    key, [num_blocks, 1, block_size, R + rotary_dim], which are also its value."""
    kernels = kernels_for(device, dtype)
    cache: LayerCache = kernels.allocate_latent_cache(num_blocks, block_size, rank, rotary_dim, dtype, device)
    return cache


def embed(token_ids: Tensor, table: Tensor) -> Tensor:  # [T], [V, H] -> [T, H]
    return reference.embed(token_ids, table)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, as_fp8: bool = False) -> Rows:  # [T, H], [H] -> [T, H]
    kernels = kernels_for(x.device, x.dtype)
    out: Rows = kernels.rms_norm_fp8(x, weight, eps) if as_fp8 else kernels.rms_norm(x, weight, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, as_fp8: bool = False) -> Rows:
    """Adds x to `residual` in place and returns the norm of the sum. All [T, H]."""
    kernels = kernels_for(x.device, x.dtype)
    norm = kernels.add_rms_norm_fp8 if as_fp8 else kernels.add_rms_norm
    out: Rows = norm(x, residual, weight, eps)
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, as_fp8: bool = False) -> Rows:
    kernels = kernels_for(x.device, x.dtype)
    norm = kernels.layer_norm_fp8 if as_fp8 else kernels.layer_norm
    out: Rows = norm(x, weight, bias, eps)
    return out


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, *, as_fp8: bool = False
) -> Rows:
    """Adds x to `residual` in place and returns the norm of the sum. All [T, H]."""
    kernels = kernels_for(x.device, x.dtype)
    norm = kernels.add_layer_norm_fp8 if as_fp8 else kernels.add_layer_norm
    out: Rows = norm(x, residual, weight, bias, eps)
    return out


def rope_and_store(
    qkv: Tensor,  # [T, (Hq + 2 * Hkv) * D]
    layout: StepLayout,
    cos_sin: Tensor,  # [max_len, D] float32, cosines in the first half of a row, sines in the second
    cache: LayerCache,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None = None,  # [D], RMS norm of each head before the rotation
    k_norm: Tensor | None = None,  # [D]
    eps: float = 1e-6,
) -> Tensor:  # [T, Hq, D]
    """Rotates queries and keys, and stores keys and values where `slot_mapping` says. May use `qkv` as scratch."""
    kernels = kernels_for(qkv.device, qkv.dtype)
    out: Tensor = kernels.rope_and_store(qkv, layout, cos_sin, cache, num_heads, num_kv_heads, q_norm, k_norm, eps)
    return out


def paged_attention(
    q: Tensor,  # [T, Hq, D]
    cache: LayerCache,
    layout: StepLayout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    slides: bool = True,
    sinks: Tensor | None = None,  # [Hq] float32
    slopes: Tensor | None = None,  # [Hq] float32
) -> Tensor:  # [T, Hq * D]
    """Attends from position p to positions max(0, p - window + 1)..p of the same sequence, read from the cache; or to p
    // window * window..p, if the window does not slide. A sink is one more score of its head, without a value: it only
    takes its share of the softmax. A slope lowers the scores of its head in proportion to the distance (ALiBi).

    `q` must come from `rope_and_store`: on a GPU the step's own keys and values are beside it in memory.
    """
    out: Tensor = kernels_for(q.device, q.dtype).paged_attention(
        q, cache, layout, scale, window, softcap, slides=slides, sinks=sinks, slopes=slopes
    )
    return out


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


def rope_and_store_latent(
    q: Tensor,  # [T, Hq, R + rotary_dim]
    latents: Tensor,  # [T, R]
    rotary_keys: Tensor,  # [T, rotary_dim]
    layout: StepLayout,
    cos_sin: Tensor,  # [max_len, rotary_dim] float32, cosines in the first half of a row, sines in the second
    cache: LayerCache,
) -> None:
    """Rotates the last dimensions of the queries in place, and stores latents and rotated keys as one head."""
    kernels_for(q.device, q.dtype).rope_and_store_latent(q, latents, rotary_keys, layout, cos_sin, cache)


def latent_attention(
    q: Tensor,  # [T, Hq, R + rotary_dim]
    cache: LayerCache,
    layout: StepLayout,
    scale: float,
) -> Tensor:  # [T, Hq, R]
    """Attends as `paged_attention` does, over a cache of latents: all query heads share its one head."""
    out: Tensor = kernels_for(q.device, q.dtype).latent_attention(q, cache, layout, scale)
    return out


def rotate(qkv: Tensor, positions: Tensor, cos_sin: Tensor, num_heads: int) -> None:  # [T, 3 * H * D], [T]
    """Rotates queries and keys in place, for an encoder, which has no cache to store them in."""
    kernels_for(qkv.device, qkv.dtype).rotate(qkv, positions, cos_sin, num_heads)


def bidirectional_attention(
    qkv: Tensor,  # [T, 3 * H * D]
    layout: PackedLayout,
    num_heads: int,
    scale: float,
    reach: int | None = None,
) -> Tensor:  # [T, H * D]
    """Attends from each token to all tokens of its text, or to those up to `reach` before and after it."""
    attend = kernels_for(qkv.device, qkv.dtype).bidirectional_attention
    out: Tensor = attend(qkv, layout, num_heads, scale, reach)
    return out


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


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Computes cap * tanh(x / cap) in place."""
    out: Tensor = kernels_for(x.device, x.dtype).soft_cap(x, cap)
    return out


def apply_bitmask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:  # [R, V], [Q] int64, [Q, words] int32
    """Sets logits[rows[i], t] to -inf, in place, where bit t % 32 of bits[i, t // 32] is not set."""
    kernels_for(logits.device, logits.dtype).apply_bitmask(logits, rows, bits)


def copy_blocks(caches: list[LayerCache], sources: Tensor, targets: Tensor) -> None:
    """Copies blocks sources[i] to targets[i] in every layer. No block may be both a source and a target."""
    reference.copy_blocks(caches, sources, targets)


_ranges: Ranges | None = None


def record_ranges(ranges: Ranges | None) -> None:
    """Put a range around each operation from now on; None: no more. Without ranges an operation pays nothing for
    this."""
    global _ranges  # noqa: PLW0603  one profiler per process
    _ranges = ranges
    kernels_for.cache_clear()
    if has_numba():
        from headrace.kernels.cpu import linear

        linear.record_ranges(ranges)


@functools.cache
def kernels_for(device: torch.device, dtype: torch.dtype) -> ModuleType:
    kernels = _kernels_for(device, dtype)
    return kernels if _ranges is None else cast(ModuleType, RangedKernels(kernels, _ranges))


def _kernels_for(device: torch.device, dtype: torch.dtype) -> ModuleType:
    if device.type == "cpu" and dtype == torch.float32 and has_numba():
        from headrace.kernels import cpu  # imported late: numba takes a while

        return cpu
    if device.type == "cuda":
        from headrace.kernels import gpu

        return gpu
    return reference


def has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None
