"""RoPE, the write to the paged cache and decode attention in one kernel, for steps of few sequences.

Such a step is bound by how long memory takes to answer. A program loads its first keys and values, which are of earlier
steps, while the QKV projection still runs; when that has ended, it only needs its queries and the step's own token.

    before the wait    context length, block table, cosines and sines, first tile of keys and values
    after it           queries: norm, rotation; the last split: keys and values of the step's tokens, its own into the
                       cache; first tile, the tiles after it, merge of the splits by the program that ends last

In a step that verifies drafts, the tokens of a slot are decodes of their own, one after the other. What a token needs
of those before it is not in the cache yet, so its program computes their keys again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.attention_loop import (
    LOG2E,
    NO_WINDOW,
    add_bias,
    add_sink,
    cap_softly,
    first_seen,
    in_dot_dtype,
    softmax_step,
    widen_fp8,
)
from headrace.kernels.gpu.decode_attention import MAX_SPLITS, own_splits
from headrace.kernels.gpu.dependent_launch import dependent_launch, let_next_start, wait_for_kernels_before
from headrace.kernels.gpu.e3m4 import key_in, scale_of_head, stored_key
from headrace.kernels.gpu.rope import mixed_columns, rotated
from headrace.kernels.layout import LayerCache, StepLayout

MAX_FEW_DECODES = 16
_MERGED_TOGETHER = 8
_MIN_HEAD_DIM = 32  # tensor cores multiply at least 16 dimensions, and a head is two halves here
_MIN_ROWS = 16  # of a dot product


def takes_few_decodes(layout: StepLayout, head_dim: int) -> bool:
    """See `ops.takes_few_decodes`."""
    return layout.shared is None and head_dim >= _MIN_HEAD_DIM


def rope_and_attend(
    qkv: Tensor,  # [T, (Hq + 2 * Hkv) * D]
    layout: StepLayout,
    cos_sin: Tensor,  # [max_len, D] float32
    cache: LayerCache,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    slides: bool = True,
    sinks: Tensor | None = None,  # [Hq] float32
    slopes: Tensor | None = None,  # [Hq] float32
) -> Tensor:  # [T, Hq * D]
    """See `ops.rope_and_attend`. The contexts of all sequences are split alike."""
    num_seqs, head_dim = qkv.shape[0], cos_sin.shape[1]
    out = torch.empty((num_seqs, num_heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    num_splits, arrivals = layout.splits.num_splits, layout.splits.arrivals
    partial, sums = qkv, qkv
    if num_splits > 1:
        partial = torch.empty((num_seqs, num_heads, num_splits, head_dim), dtype=torch.float32, device=qkv.device)
        sums = torch.empty((num_seqs, num_heads, num_splits, 2), dtype=torch.float32, device=qkv.device)
        if arrivals is None:
            arrivals = torch.zeros(num_seqs * num_kv_heads, dtype=torch.int32, device=qkv.device)
        assert arrivals.dtype == torch.int32 and arrivals.numel() >= num_seqs * num_kv_heads
    is_fp8 = cache.keys.element_size() == 1
    tile, num_warps, num_stages = _tile_shape(head_dim, num_seqs)
    _rope_and_attend[(num_kv_heads, num_seqs * num_splits)](
        qkv,
        cache.keys,
        cache.values,
        cache.values.view(torch.int16) if is_fp8 else cache.values,
        qkv if cache.key_units is None else cache.key_units,
        layout.block_tables,
        layout.slots,
        layout.context_lens,
        layout.context_lens if layout.offsets is None else layout.offsets,
        cos_sin,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        out,
        partial,
        sums,
        qkv if arrivals is None else arrivals,
        qkv if sinks is None else sinks,
        qkv if slopes is None else slopes,
        eps,
        layout.block_tables.stride(0),
        scale * LOG2E,
        NO_WINDOW if window is None else window,
        0.0 if softcap is None else softcap,
        layout.splits.min_tokens,
        num_splits,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        ROWS=max(_MIN_ROWS, triton.next_power_of_2(num_heads // num_kv_heads)),
        NEW_BLOCK=1 if layout.offsets is None else MAX_FEW_DECODES,
        HEAD_DIM=head_dim,
        HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
        BLOCK_SIZE=cache.block_size,
        TILE=tile,
        HAS_SPLITS=num_splits > 1,
        HAS_OFFSETS=layout.offsets is not None,
        HAS_WINDOW=window is not None,
        SLIDES=slides,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        HAS_SLOPES=slopes is not None,
        HAS_Q_NORM=q_norm is not None,
        HAS_K_NORM=k_norm is not None,
        HADAMARD_PASSES=cache.hadamard_len.bit_length() - 1,
        IN_PAIRS=is_fp8,
        IS_INTERPRETED=triton.knobs.runtime.interpret,
        MAX_SPLITS=MAX_SPLITS,
        MERGED_TOGETHER=_MERGED_TOGETHER,
        num_warps=num_warps,
        num_stages=num_stages,
        **dependent_launch(qkv.device),
    )
    return out


def _tile_shape(head_dim: int, num_seqs: int) -> tuple[int, int, int]:
    """Returns keys per tile, warps and stages: the best of sweeps on an H200 over 550 to 4,000 tokens, 2026-11-17."""
    if head_dim > 128:
        return 32, 4, 3
    if num_seqs > 1:
        return 64, 2, 3
    return (128, 4, 2) if head_dim <= 64 else (64, 8, 3)


@triton.jit(do_not_specialize=["min_split", "num_splits"])
def _rope_and_attend(
    qkv,
    keys,
    values,
    paired_values,  # the same memory; of an FP8 cache as 16-bit words, see `decode_attention`
    key_units,
    block_tables,
    slots,
    context_lens,
    offsets,
    cos_sin,
    q_norm,
    k_norm,
    out,
    partial,
    sums,
    arrivals,
    sinks,
    slopes,
    eps,
    table_stride,
    scale,
    window,
    softcap,
    min_split,
    num_splits,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    NEW_BLOCK: tl.constexpr,  # most tokens of one sequence in this step
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SLIDES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    HADAMARD_PASSES: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MERGED_TOGETHER: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Computes one kv head of one sequence, or of one split of its context.

    Heads are two parts of half their size: keys and queries are rotated so, and values are weighted so (of an FP8
    cache, even and odd dimensions). What is read before the wait was written before the lookup of the embeddings
    ended its own (`embeddings.py`)."""
    let_next_start(IS_DEPENDENT)
    head, item = tl.program_id(0), tl.program_id(1)
    seq, split = item, 0
    if HAS_SPLITS:
        seq = item // num_splits
        split = item - seq * num_splits
    context_len = tl.load(context_lens + seq)
    table = block_tables + tl.load(slots + seq).to(tl.int64) * table_stride
    own = tl.maximum(context_len - 1, 0)  # position of the token
    cached = own  # tokens of earlier steps
    if HAS_OFFSETS:
        cached = tl.maximum(own - tl.load(offsets + seq), 0)
    first = 0
    if HAS_WINDOW:
        first = first_seen(own, window, SLIDES)
    begin = first // TILE * TILE
    count, end = 1, cached
    if HAS_SPLITS:
        count, per_split = own_splits(cached - begin, min_split, num_splits, TILE)
        begin = begin + split * per_split
        end = tl.minimum(cached, begin + per_split)

    HALF: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, HALF_BLOCK)
    tokens = tl.arange(0, TILE)
    key_first, key_second, value_left, value_right = _load_tile(
        keys, paired_values, table, begin + tokens, end, head, dims, NUM_KV_HEADS, HEAD_DIM, HALF_BLOCK, BLOCK_SIZE,
        IN_PAIRS,
    )  # fmt: skip
    angles = cos_sin + own.to(tl.int64) * HEAD_DIM + dims
    cos = tl.load(angles, mask=dims < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=dims < HALF, other=0.0)
    last_block = tl.load(table + own // BLOCK_SIZE).to(tl.int64)
    scale = scale_of_head(scale, keys, key_units, head)
    wait_for_kernels_before(IS_DEPENDENT)
    if (context_len == 0) | (split >= count):  # padding, or nothing is left for this split
        return

    QKV_DIM: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    line = qkv + seq.to(tl.int64) * QKV_DIM
    rows = tl.arange(0, ROWS)
    is_head = rows < GROUP
    is_part = is_head[:, None] & (dims[None, :] < HALF)
    left_dims, right_dims = dims, dims + HALF
    if IN_PAIRS:
        left_dims, right_dims = 2 * dims, 2 * dims + 1
    # Only the last split needs the step's keys and values, but all loads are issued together: each takes as long as all
    # of them.
    num_new = own - cached + 1
    key = line + (NUM_HEADS + head) * HEAD_DIM - (num_new - 1) * QKV_DIM
    if HAS_OFFSETS:
        new_tokens = tl.arange(0, NEW_BLOCK)
        is_new = (new_tokens < num_new)[:, None] & (dims[None, :] < HALF)
        new_angles = cos_sin + (cached + new_tokens).to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
        new_cos = tl.load(new_angles, mask=is_new, other=0.0)
        new_sin = tl.load(new_angles + HALF, mask=is_new, other=0.0)
    else:
        new_tokens = tl.arange(0, 1)
        is_new = dims[None, :] < HALF
        new_cos, new_sin = cos[None, :], sin[None, :]
    value = key + NUM_KV_HEADS * HEAD_DIM + new_tokens[:, None] * QKV_DIM
    left_value = tl.load(value + left_dims[None, :], mask=is_new, other=0.0)
    right_value = tl.load(value + right_dims[None, :], mask=is_new, other=0.0)
    new_first, new_second, _ = rotated(
        key, QKV_DIM, k_norm, new_cos, new_sin, dims, eps, num_new, NEW_BLOCK, HEAD_DIM, HAS_K_NORM
    )
    query = line + head * GROUP * HEAD_DIM
    query_first, query_second, _ = rotated(
        query, HEAD_DIM, q_norm, cos[None, :], sin[None, :], dims, eps, GROUP, ROWS, HEAD_DIM, HAS_Q_NORM
    )
    query_first = mixed_columns(query_first, ROWS, HALF_BLOCK, HADAMARD_PASSES).to(qkv.dtype.element_ty)
    query_second = mixed_columns(query_second, ROWS, HALF_BLOCK, HADAMARD_PASSES).to(qkv.dtype.element_ty)
    query_first, query_second = in_dot_dtype(query_first, keys), in_dot_dtype(query_second, keys)

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    left = tl.zeros([ROWS, HALF_BLOCK], tl.float32)
    right = tl.zeros([ROWS, HALF_BLOCK], tl.float32)
    if split == count - 1:  # the step's tokens
        new_first = mixed_columns(new_first, NEW_BLOCK, HALF_BLOCK, HADAMARD_PASSES)
        new_second = mixed_columns(new_second, NEW_BLOCK, HALF_BLOCK, HADAMARD_PASSES)
        first_part = stored_key(new_first, keys, key_units, head)
        second_part = stored_key(new_second, keys, key_units, head)
        left_part, right_part = left_value.to(values.dtype.element_ty), right_value.to(values.dtype.element_ty)
        # Each program stores its own token: others of the same slot have programs too.
        place = ((last_block * NUM_KV_HEADS + head) * BLOCK_SIZE + own % BLOCK_SIZE) * HEAD_DIM
        is_own = is_new & (new_tokens == num_new - 1)[:, None]
        tl.store(keys + place + tl.broadcast_to(dims[None, :], first_part.shape), first_part, mask=is_own)
        tl.store(keys + place + tl.broadcast_to(HALF + dims[None, :], first_part.shape), second_part, mask=is_own)
        tl.store(values + place + tl.broadcast_to(left_dims[None, :], first_part.shape), left_part, mask=is_own)
        tl.store(values + place + tl.broadcast_to(right_dims[None, :], first_part.shape), right_part, mask=is_own)
        if HAS_OFFSETS:
            slope = tl.zeros([ROWS], tl.float32)
            if HAS_SLOPES:
                slope = tl.load(slopes + head * GROUP + rows, mask=is_head, other=0.0)
            highest, total, left, right = _see_tile(
                highest, total, left, right, query_first, query_second, first_part, second_part,
                left_part.to(query_first.dtype), right_part.to(query_first.dtype),
                cached + new_tokens, first, own + 1, own, scale, softcap, slope,
                ROWS, HAS_WINDOW, HAS_SOFTCAP, HAS_SLOPES, False, IS_INTERPRETED,
            )  # fmt: skip
        else:
            first_part = key_in(tl.float32, first_part, IS_INTERPRETED)
            second_part = key_in(tl.float32, second_part, IS_INTERPRETED)
            highest = tl.sum(query_first.to(tl.float32) * first_part, axis=1)
            highest += tl.sum(query_second.to(tl.float32) * second_part, axis=1)
            highest *= scale
            if HAS_SOFTCAP:
                highest = cap_softly(highest, softcap)
            total += 1.0
            left += left_part.to(tl.float32)
            right += right_part.to(tl.float32)

    slope = tl.zeros([ROWS], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + head * GROUP + rows, mask=is_head, other=0.0)
    highest, total, left, right = _see_tile(
        highest, total, left, right, query_first, query_second, key_first, key_second, value_left, value_right,
        begin + tokens, first, end, own, scale, softcap, slope,
        ROWS, HAS_WINDOW, HAS_SOFTCAP, HAS_SLOPES, IN_PAIRS, IS_INTERPRETED,
    )  # fmt: skip
    for start in tl.range(begin + TILE, end, TILE):
        key_first, key_second, value_left, value_right = _load_tile(
            keys, paired_values, table, start + tokens, end, head, dims, NUM_KV_HEADS, HEAD_DIM, HALF_BLOCK, BLOCK_SIZE,
            IN_PAIRS,
        )  # fmt: skip
        highest, total, left, right = _see_tile(
            highest, total, left, right, query_first, query_second, key_first, key_second, value_left, value_right,
            start + tokens, first, end, own, scale, softcap, slope,
            ROWS, HAS_WINDOW, HAS_SOFTCAP, HAS_SLOPES, IN_PAIRS, IS_INTERPRETED,
        )  # fmt: skip

    first_row = seq.to(tl.int64) * NUM_HEADS + head * GROUP
    if HAS_SPLITS and count > 1:
        mine = (first_row + rows) * num_splits + split
        tl.store(partial + mine[:, None] * HEAD_DIM + left_dims[None, :], left, mask=is_part)
        tl.store(partial + mine[:, None] * HEAD_DIM + right_dims[None, :], right, mask=is_part)
        tl.store(sums + mine * 2, highest, mask=is_head)
        tl.store(sums + mine * 2 + 1, total, mask=is_head)
        tl.debug_barrier()  # the whole program has stored its partial result before it counts as arrived
        arrival = arrivals + seq * NUM_KV_HEADS + head
        if tl.atomic_add(arrival, 1, sem="acq_rel") < count - 1:
            return
        tl.store(arrival, 0)  # the next kernel expects zeros
        _merge_splits(
            out, partial, sums, sinks + head * GROUP, first_row, count, num_splits,
            GROUP, HEAD_DIM, 2 * HALF_BLOCK, MAX_SPLITS, HAS_SINKS, MERGED_TOGETHER,
        )  # fmt: skip
        return
    if HAS_SINKS:
        sink = tl.load(sinks + head * GROUP + rows, mask=is_head, other=0.0)
        _, right = add_sink(highest, total, right, sink)
        total, left = add_sink(highest, total, left, sink)
    at = out + (first_row + rows)[:, None] * HEAD_DIM
    tl.store(at + left_dims[None, :], (left / total[:, None]).to(out.dtype.element_ty), mask=is_part)
    tl.store(at + right_dims[None, :], (right / total[:, None]).to(out.dtype.element_ty), mask=is_part)


@triton.jit
def _load_tile(
    keys,
    values,
    table,
    position,
    end,
    head,
    dims,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IN_PAIRS: tl.constexpr,
):
    """Returns the parts of the keys and values at these positions. Values in pairs are one tensor, twice."""
    HALF: tl.constexpr = HEAD_DIM // 2
    is_known = position < end
    block = tl.load(table + position // BLOCK_SIZE, mask=is_known, other=0).to(tl.int64)
    line = ((block * NUM_KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
    is_inside = is_known[:, None]
    if HALF_BLOCK != HALF:
        is_inside = is_known[:, None] & (dims[None, :] < HALF)
    at = line[:, None] + dims[None, :]
    key_first = tl.load(keys + at, mask=is_inside, other=0.0)
    key_second = tl.load(keys + at + HALF, mask=is_inside, other=0.0)
    if IN_PAIRS:
        left = tl.load(values + (line // 2)[:, None] + dims[None, :], mask=is_inside, other=0)
        right = left
    else:
        left = tl.load(values + at, mask=is_inside, other=0.0)
        right = tl.load(values + at + HALF, mask=is_inside, other=0.0)
    return key_first, key_second, left, right


@triton.jit
def _see_tile(
    highest,
    total,
    left,
    right,
    query_first,
    query_second,
    key_first,
    key_second,
    value_left,
    value_right,
    position,
    first,
    end,
    own,
    scale,
    softcap,
    slope,
    ROWS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Adds a tile of keys and values to the running softmax of the rows."""
    key_first = key_in(query_first.dtype, key_first, IS_INTERPRETED)
    key_second = key_in(query_second.dtype, key_second, IS_INTERPRETED)
    score = tl.dot(query_first, tl.trans(key_first))
    score = tl.dot(query_second, tl.trans(key_second), score) * scale
    if HAS_SOFTCAP:
        score = cap_softly(score, softcap)
    if HAS_SLOPES:
        score = add_bias(score, slope, tl.zeros([ROWS], tl.int32) + own, position)
    is_seen = position < end
    if HAS_WINDOW:
        is_seen = is_seen & (position >= first)
    score = tl.where(is_seen[None, :], score, float("-inf"))
    peak, total, weight, shrink = softmax_step(highest, total, score)
    weight = weight.to(query_first.dtype)
    if IN_PAIRS:
        value_left = widen_fp8(value_left, False, IS_INTERPRETED)
        value_right = widen_fp8(value_right, True, IS_INTERPRETED)
    left = tl.dot(weight, value_left, left * shrink[:, None])
    right = tl.dot(weight, value_right, right * shrink[:, None])
    return peak, total, left, right


@triton.jit
def _merge_splits(
    out,
    partial,
    sums,
    sinks,
    first_row,
    count,
    num_splits,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Merges the partial results of all splits, always in the same order, so that results repeat exactly. The loads
    bypass the L1 cache, which is not coherent; none waits for another."""
    rows = tl.arange(0, triton.next_power_of_2(GROUP))
    is_row = rows < GROUP
    places = (first_row + rows) * num_splits
    splits = tl.arange(0, MAX_SPLITS)
    at = sums + (places[:, None] + splits[None, :]) * 2
    is_there = is_row[:, None] & (splits < count)[None, :]
    peaks = tl.load(at, mask=is_there, other=float("-inf"), cache_modifier=".cg")
    weights = tl.load(at + 1, mask=is_there, other=0.0, cache_modifier=".cg")
    peak = tl.max(peaks, axis=1)
    if HAS_SINKS:
        sink = tl.load(sinks + rows, mask=is_row, other=0.0) * 1.4426950408889634
        peak = tl.maximum(peak, sink)
    peak = tl.where(is_row, peak, 0.0)
    total = tl.sum(weights * tl.exp2(peaks - peak[:, None]), axis=1)
    if HAS_SINKS:
        total += tl.exp2(sink - peak)
    dims = tl.arange(0, DIM_BLOCK)
    mixed = tl.zeros([triton.next_power_of_2(GROUP), DIM_BLOCK], tl.float32)
    for begin in range(0, count, TOGETHER):
        some = begin + tl.arange(0, TOGETHER)
        some_places = places[:, None] + some[None, :]
        is_some = is_row[:, None] & (some < count)[None, :]
        some_peaks = tl.load(sums + some_places * 2, mask=is_some, other=float("-inf"), cache_modifier=".cg")
        values = tl.load(
            partial + some_places[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=is_some[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        mixed += tl.sum(values * tl.exp2(some_peaks - peak[:, None])[:, :, None], axis=1)
    total = tl.where(is_row, total, 1.0)
    at = out + (first_row + rows)[:, None] * HEAD_DIM + dims[None, :]
    is_inside = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_inside)
