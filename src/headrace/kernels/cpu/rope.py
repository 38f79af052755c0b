"""The layer cache in the layout the attention kernel reads, and the kernel that writes to it.

Keys are stored with tokens innermost, [num_blocks, Hkv, D, block_size]: a register holds one dimension of several keys.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import reference
from headrace.kernels.cpu.cache_formats import format_of, put
from headrace.kernels.cpu.launch import arguments_at, claim, kernel
from headrace.kernels.cpu.native import Pointer, address_of, after, floats, inner, int64s
from headrace.kernels.cpu.vectors import LANES, load, mix_lanes, multiply, splat, store
from headrace.kernels.layout import LayerCache, StepLayout
from headrace.kernels.reference.e3m4 import plain_key_units
from headrace.kernels.reference.fp8 import FP8

_TASK_TOKENS = 16  # consecutive tokens of a prompt share cache lines of the keys
_FEW_TOKENS = 64  # of a step, most of them of different sequences: tasks need only be worth a claim
_TASK_FLOATS = 4096


def allocate_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """Allocates a cache whose keys have tokens innermost."""
    key_dtype = torch.uint8 if dtype == FP8 else dtype
    keys = torch.empty((num_blocks, num_kv_heads, head_dim, block_size), dtype=key_dtype, device=device)
    values = torch.empty((num_blocks, num_kv_heads, block_size, head_dim), dtype=dtype, device=device)
    units = plain_key_units(num_kv_heads, device) if dtype == FP8 else None
    return LayerCache(keys=keys.transpose(2, 3), values=values, key_units=units)


def is_token_innermost(keys: Tensor) -> bool:
    return keys.mT.is_contiguous()


def rope_and_store(
    qkv: Tensor,  # [T, (Hq + 2 * Hkv) * D]
    layout: StepLayout,
    cos_sin: Tensor,  # [max_len, D] float32, cosines in the first half of a row, sines in the second
    cache: LayerCache,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None,  # [D]
    k_norm: Tensor | None,  # [D]
    eps: float,
) -> Tensor:  # [T, Hq, D], a view of qkv
    """See `ops.rope_and_store`."""
    if not (is_token_innermost(cache.keys) and cache.values.is_contiguous()):
        return reference.rope_and_store(qkv, layout, cos_sin, cache, num_heads, num_kv_heads, q_norm, k_norm, eps)
    assert cos_sin.dtype == torch.float32 and cos_sin.is_contiguous()
    qkv = qkv.contiguous()
    num_tokens, head_dim = qkv.shape[0], cache.keys.shape[3]
    task_tokens = _TASK_TOKENS
    if num_tokens <= _FEW_TOKENS:
        task_tokens = min(_TASK_TOKENS, max(1, _TASK_FLOATS // qkv.shape[1]))
    num_tasks = -(-num_tokens // task_tokens)
    of_keys, of_values = format_of(cache.keys), format_of(cache.values)
    _rope_and_store(
        qkv,
        layout.positions,
        layout.slot_mapping,
        cos_sin,
        cache.keys,
        cache.values,
        0 if q_norm is None else q_norm,
        0 if k_norm is None else k_norm,
        0 if cache.key_units is None else cache.key_units,
        num_tokens,
        num_heads,
        num_kv_heads,
        head_dim,
        cache.block_size,
        of_keys.size,
        of_keys.shift,
        of_values.shift,
        cache.hadamard_len,
        task_tokens,
        num_tasks,
        eps,
        num_tasks=num_tasks,
    )
    return qkv.view(num_tokens, -1, head_dim)[:, :num_heads]


@kernel(
    qkv="pointer",
    positions="pointer",
    slot_mapping="pointer",
    cos_sin="pointer",
    keys="pointer",
    values="pointer",
    q_norm="pointer",
    k_norm="pointer",
    key_units="pointer",
    num_tokens="integer",
    num_heads="integer",
    num_kv_heads="integer",
    head_dim="integer",
    block_size="integer",
    size="integer",
    key_shift="integer",
    value_shift="integer",
    hadamard_len="integer",
    task_tokens="integer",
    num_tasks="integer",
    eps="float",
)
def _rope_and_store(pointer: Pointer) -> None:
    a = arguments_at(pointer)
    head_dim, num_heads, num_kv_heads = a.head_dim, a.num_heads, a.num_kv_heads
    task = claim(pointer)
    while task < a.num_tasks:
        for token in range(task * a.task_tokens, min((task + 1) * a.task_tokens, a.num_tokens)):
            q = after(floats(a.qkv), token * (num_heads + 2 * num_kv_heads) * head_dim)
            k = after(q, num_heads * head_dim)
            v = after(k, num_kv_heads * head_dim)
            angles = after(floats(a.cos_sin), int64s(a.positions)[token] * head_dim)
            slot = int64s(a.slot_mapping)[token]
            block, offset = slot // a.block_size, slot % a.block_size
            for head in range(num_heads):
                if a.q_norm != 0:
                    _normalise_head(after(q, head * head_dim), floats(a.q_norm), head_dim, a.eps)
                _rotate_head(after(q, head * head_dim), angles, head_dim)
                _mix_head(after(q, head * head_dim), head_dim, a.hadamard_len)
            for head in range(num_kv_heads):
                if a.k_norm != 0:
                    _normalise_head(after(k, head * head_dim), floats(a.k_norm), head_dim, a.eps)
                _rotate_head(after(k, head * head_dim), angles, head_dim)
                _mix_head(after(k, head * head_dim), head_dim, a.hadamard_len)
                unit = np.float32(1.0)
                if a.key_units != 0:
                    unit = floats(a.key_units)[head]
                start = (block * num_kv_heads + head) * a.block_size * head_dim
                key, value = address_of(k, head * head_dim), address_of(v, head * head_dim)
                target = a.keys + (start + offset) * a.size
                put(key, head_dim, unit, target, a.block_size, a.size, a.key_shift)
                target = a.values + (start + offset * head_dim) * a.size
                put(value, head_dim, np.float32(1.0), target, 1, a.size, a.value_shift)
        task = claim(pointer)


@inner
def _normalise_head(x: Pointer, weight: Pointer, head_dim: int, eps: float) -> None:
    squares = eps * 0
    for d in range(head_dim):
        squares += x[d] * x[d]
    scale = 1 / math.sqrt(squares / head_dim + eps)
    for d in range(head_dim):
        x[d] = x[d] * scale * weight[d]


@inner
def _rotate_head(x: Pointer, angles: Pointer, head_dim: int) -> None:
    half = head_dim // 2
    for d in range(half):
        first, second, cos, sin = x[d], x[half + d], angles[d], angles[half + d]
        x[d] = first * cos - second * sin
        x[half + d] = second * cos + first * sin


@inner
def _mix_head(x: Pointer, head_dim: int, length: int) -> None:
    """Multiplies each `length` neighbouring dimensions with the orthonormal Hadamard matrix."""
    if length == 1:
        return
    step = 1
    if head_dim % LANES == 0:
        scale = splat(1 / math.sqrt(length))
        for d in range(0, head_dim, LANES):
            store(x, d, mix_lanes(multiply(load(x, d), scale), length))
        step = LANES
    else:
        for d in range(head_dim):
            x[d] = x[d] / math.sqrt(length)
    while step < length:
        for start in range(0, head_dim, 2 * step):
            for d in range(start, start + step):
                first, second = x[d], x[d + step]
                x[d], x[d + step] = first + second, first - second
        step *= 2
