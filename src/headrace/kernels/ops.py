"""The operations a model calls: each goes to the fast kernel of the tensor's device, or else to its PyTorch twin."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headrace.kernels import twins
from headrace.kernels.layout import LayerCache, StepLayout

__all__ = [
    "LayerCache",
    "PackedLinear",
    "StepLayout",
    "add_rms_norm",
    "allocate_cache",
    "copy_blocks",
    "embed",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rope_and_store",
    "silu_and_mul",
]


class PackedLinear(Protocol):
    """A weight matrix and its bias in the form their device multiplies fastest."""

    def __call__(self, x: Tensor) -> Tensor: ...  # [T, K] -> [T, N]


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:  # [N, K], [N]
    return twins.pack_linear(weight, bias)


def allocate_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """One layer's cache, [num_blocks, Hkv, block_size, D] for keys and for values; no memory is touched yet on a CPU."""
    return twins.allocate_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype, device)


def embed(token_ids: Tensor, table: Tensor) -> Tensor:  # [T], [V, H] -> [T, H]
    return twins.embed(token_ids, table)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [T, H], [H] -> [T, H]
    return twins.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x to `residual` in place and returns the norm of the sum. All [T, H]."""
    return twins.add_rms_norm(x, residual, weight, eps)


def rope_and_store(
    qkv: Tensor,  # [T, (Hq + 2 * Hkv) * D]
    layout: StepLayout,
    cos_sin: Tensor,  # [max_len, D] float32, cosines in the first half of a line, sines in the second
    cache: LayerCache,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None = None,  # [D], RMS norm of each head before the rotation
    k_norm: Tensor | None = None,  # [D]
    eps: float = 1e-6,
) -> Tensor:  # [T, Hq, D]
    """Rotates queries and keys, and stores keys and values at the step's slots. May use `qkv` as scratch."""
    return twins.rope_and_store(qkv, layout, cos_sin, cache, num_heads, num_kv_heads, q_norm, k_norm, eps)


def paged_attention(
    q: Tensor,  # [T, Hq, D]
    cache: LayerCache,
    layout: StepLayout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:  # [T, Hq * D]
    """A token at position p attends to positions max(0, p - window + 1)..p of its own sequence, read from the cache."""
    return twins.paged_attention(q, cache, layout, scale, window, softcap)


def silu_and_mul(gate_up: Tensor) -> Tensor:  # [T, 2 * I] -> [T, I], silu(first half) * second half
    return twins.silu_and_mul(gate_up)


def copy_blocks(caches: list[LayerCache], sources: Tensor, targets: Tensor) -> None:
    """Copies blocks sources[i] to targets[i] in every layer. No block may be both a source and a target."""
    twins.copy_blocks(caches, sources, targets)
