"""Rotary embedding of queries and keys, and the write of keys and values to the paged cache, in one pass over QKV."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.dependent_launch import dependent_launch, wait_for_inputs
from headrace.kernels.gpu.e3m4 import stored_key
from headrace.kernels.layout import LayerCache, StepLayout


def rope_and_store(
    qkv: Tensor,  # [T, (Hq + 2 * Hkv) * D]
    layout: StepLayout,
    cos_sin: Tensor,  # [max_len, D] float32
    cache: LayerCache,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:  # [T, Hq, D], a view of qkv, which also holds the rotated keys
    num_tokens = qkv.shape[0]
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    if num_tokens:
        _rope_and_store[(num_tokens, num_kv_heads)](
            qkv,
            layout.positions,
            layout.slot_mapping,
            cos_sin,
            cache.keys,
            cache.values,
            qkv if cache.key_units is None else cache.key_units,
            qkv if q_norm is None else q_norm,
            qkv if k_norm is None else k_norm,
            eps,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=cache.block_size,
            GROUP_BLOCK=triton.next_power_of_2(num_heads // num_kv_heads),
            HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
            HAS_Q_NORM=q_norm is not None,
            HAS_K_NORM=k_norm is not None,
            HADAMARD_PASSES=cache.hadamard_len.bit_length() - 1,
            num_warps=1,
            **dependent_launch(qkv.device),
        )
    return qkv.view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)[:, :num_heads]


def rotate(qkv: Tensor, positions: Tensor, cos_sin: Tensor, num_heads: int) -> None:  # [T, 3 * H * D], [T] int32
    """Rotates queries and keys in place, without a cache."""
    num_tokens = qkv.shape[0]
    head_dim = qkv.shape[1] // (3 * num_heads)
    if num_tokens:
        _rotate[(num_tokens,)](
            qkv,
            positions,
            cos_sin,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            HEAD_BLOCK=triton.next_power_of_2(2 * num_heads),
            HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
            num_warps=4,
        )


@triton.jit
def _rotate(
    qkv,
    positions,
    cos_sin,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """Rotates all query and key heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, HALF_BLOCK)
    half: tl.constexpr = HEAD_DIM // 2
    angles = cos_sin + tl.load(positions + token).to(tl.int64) * HEAD_DIM
    cos = tl.load(angles + dims, mask=dims < half, other=0.0)
    sin = tl.load(angles + half + dims, mask=dims < half, other=0.0)
    heads = qkv + token * 3 * NUM_HEADS * HEAD_DIM
    first, second, inside = rotated(
        heads, HEAD_DIM, heads, cos[None, :], sin[None, :], dims, 0.0, 2 * NUM_HEADS, HEAD_BLOCK, HEAD_DIM, False
    )
    at = heads + tl.arange(0, HEAD_BLOCK)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(at, first.to(qkv.dtype.element_ty), mask=inside)
    tl.store(at + half, second.to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def rotated(
    heads, stride, norm, cos, sin, dims, eps, num, BLOCK: tl.constexpr, DIM: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Returns both halves of `num` heads, which are `stride` apart, normed if asked and rotated; [BLOCK, D / 2] each.
    Cosines and sines are [1, D / 2] or [BLOCK, D / 2]."""
    lines = tl.arange(0, BLOCK)
    inside = (lines[:, None] < num) & (dims[None, :] < DIM // 2)
    at = heads + lines[:, None] * stride + dims[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        power = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / DIM
        scale = tl.rsqrt(power + eps)[:, None]
        gain_first = tl.load(norm + dims, mask=dims < DIM // 2, other=0.0).to(tl.float32)
        gain_second = tl.load(norm + DIM // 2 + dims, mask=dims < DIM // 2, other=0.0).to(tl.float32)
        first = (first * scale * gain_first[None, :]).to(heads.dtype.element_ty).to(tl.float32)
        second = (second * scale * gain_second[None, :]).to(heads.dtype.element_ty).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin, inside


@triton.jit
def mixed_columns(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, PASSES: tl.constexpr):  # [ROWS, WIDTH]
    """Multiplies each 2 ** PASSES neighbouring columns with the orthonormal Hadamard matrix: in each pass, sums of
    neighbours go to the first half of these columns and differences to the second. See `LayerCache.hadamard_len`."""
    if PASSES:
        LEN: tl.constexpr = 1 << PASSES
        groups = tl.reshape(x, (ROWS * WIDTH // LEN, LEN))
        for _ in tl.static_range(PASSES):
            left, right = tl.split(tl.reshape(groups, (ROWS * WIDTH // LEN, LEN // 2, 2)))
            pairs = tl.permute(tl.join(left + right, left - right), (0, 2, 1))
            groups = tl.reshape(pairs, (ROWS * WIDTH // LEN, LEN)) * 0.7071067811865476  # 2 ** -0.5
        x = tl.reshape(groups, (ROWS, WIDTH))
    return x


@triton.jit
def _rope_and_store(
    qkv,
    positions,
    slot_mapping,
    cos_sin,
    keys,
    values,
    key_units,
    q_norm,
    k_norm,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    HADAMARD_PASSES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Computes one kv head of one token, and the query heads that share it."""
    wait_for_inputs(IS_DEPENDENT)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, HALF_BLOCK)
    half: tl.constexpr = HEAD_DIM // 2
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    angles = cos_sin + tl.load(positions + token) * HEAD_DIM
    cos = tl.load(angles + dims, mask=dims < half, other=0.0)
    sin = tl.load(angles + half + dims, mask=dims < half, other=0.0)

    line = qkv + token * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    query = line + head * group * HEAD_DIM
    first, second, inside = rotated(
        query, HEAD_DIM, q_norm, cos[None, :], sin[None, :], dims, eps, group, GROUP_BLOCK, HEAD_DIM, HAS_Q_NORM
    )
    first = mixed_columns(first, GROUP_BLOCK, HALF_BLOCK, HADAMARD_PASSES)
    second = mixed_columns(second, GROUP_BLOCK, HALF_BLOCK, HADAMARD_PASSES)
    at = query + tl.arange(0, GROUP_BLOCK)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(at, first.to(qkv.dtype.element_ty), mask=inside)
    tl.store(at + half, second.to(qkv.dtype.element_ty), mask=inside)

    # Where this token and head go in the cache: [block, head, offset, dim].
    slot = tl.load(slot_mapping + token)
    place = ((slot // BLOCK_SIZE * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM + dims[None, :]
    key = line + (NUM_HEADS + head) * HEAD_DIM
    first, second, inside = rotated(
        key, HEAD_DIM, k_norm, cos[None, :], sin[None, :], dims, eps, 1, 1, HEAD_DIM, HAS_K_NORM
    )
    first = mixed_columns(first, 1, HALF_BLOCK, HADAMARD_PASSES)
    second = mixed_columns(second, 1, HALF_BLOCK, HADAMARD_PASSES)
    tl.store(keys + place, stored_key(first, keys, key_units, head), mask=inside)
    tl.store(keys + place + half, stored_key(second, keys, key_units, head), mask=inside)
    at = key + tl.arange(0, 1)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(at, first.to(qkv.dtype.element_ty), mask=inside)
    tl.store(at + half, second.to(qkv.dtype.element_ty), mask=inside)

    value = key + NUM_KV_HEADS * HEAD_DIM + dims[None, :]
    tl.store(values + place, tl.load(value, mask=inside, other=0.0).to(values.dtype.element_ty), mask=inside)
    second = tl.load(value + half, mask=inside, other=0.0)
    tl.store(values + place + half, second.to(values.dtype.element_ty), mask=inside)
