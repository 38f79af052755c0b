"""Decode attention: one query token per sequence. One program computes one kv head of one sequence, or of one split
of its context. The query heads that share the kv head are the rows of its dot products."""

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
from headrace.kernels.gpu.dependent_launch import dependent_launch, let_next_start, wait_for_kernels_before
from headrace.kernels.gpu.e3m4 import key_in, scale_of_head
from headrace.kernels.gpu.shared_attention import SHARED_SPLITS, shared_attention
from headrace.kernels.layout import LayerCache, StepLayout


def decode_attention(
    q: Tensor,
    cache: LayerCache,
    layout: StepLayout,
    out: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    *,
    slides: bool = True,
    sinks: Tensor | None = None,  # [Hq] float32
    slopes: Tensor | None = None,  # [Hq] float32
) -> None:
    """Computes the first `num_decodes` sequences, which have one token each.

    Long contexts are split over several programs, and all contexts are when there are few sequences. A prefix that
    several sequences share is computed for all of them at once (`shared_attention`). Each split leaves a partial
    result; the program that finishes a sequence last merges them by their weights.
    """
    num_seqs, num_heads, head_dim = layout.num_decodes, q.shape[1], q.shape[2]
    num_kv_heads = cache.keys.shape[1]
    shared = layout.shared if window is None else None
    num_splits = layout.splits.num_splits
    num_split_seqs = num_seqs if layout.splits.num_seqs is None else min(num_seqs, layout.splits.num_seqs)
    num_split_seqs = 0 if num_splits == 1 else num_split_seqs
    num_partials = num_splits + (SHARED_SPLITS if shared is not None else 0)
    partial, sums, arrivals = q, q, layout.splits.arrivals
    if num_partials > 1:
        num_merged = num_split_seqs if shared is None else num_seqs
        partial = torch.empty((num_merged, num_heads, num_partials, head_dim), dtype=torch.float32, device=q.device)
        sums = torch.empty((num_merged, num_heads, num_partials, 2), dtype=torch.float32, device=q.device)
        if arrivals is None:
            arrivals = torch.zeros(num_split_seqs * num_kv_heads, dtype=torch.int32, device=q.device)
        assert arrivals.dtype == torch.int32 and arrivals.numel() >= num_split_seqs * num_kv_heads
    common = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "DIM_BLOCK": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": cache.block_size,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_SLOPES": slopes is not None,
        "IS_INTERPRETED": triton.knobs.runtime.interpret,
    }
    if shared is not None:
        shared_attention(q, cache, layout, shared, partial, sums, scale, softcap, slopes, num_splits, **common)
    is_fp8 = cache.keys.element_size() == 1
    tile, num_warps, num_stages = _decode_shape(head_dim, is_fp8=is_fp8)
    num_items = num_split_seqs * num_splits + num_seqs - num_split_seqs  # all splits of the split contexts come first
    _decode[(num_kv_heads, num_items)](
        q,
        cache.keys,
        cache.values.view(torch.int16) if is_fp8 else cache.values,
        q if cache.key_units is None else cache.key_units,
        layout.block_tables,
        layout.slots,
        layout.context_lens,
        layout.context_lens if shared is None else shared.lens,
        out,
        partial,
        sums,
        q if arrivals is None else arrivals,
        q if sinks is None else sinks,
        q if slopes is None else slopes,
        q.stride(0),
        layout.block_tables.stride(0),
        scale * LOG2E,
        NO_WINDOW if window is None else window,
        0.0 if softcap is None else softcap,
        layout.splits.min_tokens,
        num_splits,
        num_split_seqs,
        num_partials,
        GROUP_BLOCK=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        TILE=tile,
        HAS_PARTIALS=num_partials > 1,
        HAS_SHARED=shared is not None,
        SHARED_SPLITS=SHARED_SPLITS,
        HAS_WINDOW=window is not None,
        SLIDES=slides,
        HAS_SINKS=sinks is not None,
        IN_PAIRS=is_fp8,
        MERGED_TOGETHER=_MERGED_TOGETHER,
        num_warps=num_warps,
        num_stages=num_stages,
        **common,
        **dependent_launch(q.device),
    )


MAX_SPLITS = 32
_MERGED_TOGETHER = 4


def _decode_shape(head_dim: int, *, is_fp8: bool) -> tuple[int, int, int]:
    """Returns keys per loop iteration, warps and stages: the best of sweeps on an H200, 2026-11-15."""
    if is_fp8:
        return 64, 2, 5
    return (32, 1, 6) if head_dim <= 64 else (64, 2, 3)


@triton.jit(do_not_specialize=["min_split", "num_splits", "num_split_seqs", "num_partials"])
def _decode(
    q,
    keys,
    values,
    key_units,
    block_tables,
    slots,
    context_lens,
    shared_lens,
    out,
    partial,
    sums,
    arrivals,
    sinks,
    slopes,
    q_stride,
    table_stride,
    scale,
    window,
    softcap,
    min_split,
    num_splits,
    num_split_seqs,
    num_partials,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_PARTIALS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    SHARED_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SLIDES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    MERGED_TOGETHER: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Reads FP8 values as 16-bit pairs of dimensions: a GPU can transpose tiles of 16-bit words for its dot
    products, but not of bytes.

    What is read before the wait describes the step: kernels wrote it before the lookup of the embeddings, which waits
    for them before it lets the next kernel start (`embeddings.py`), so it is complete when any kernel after that
    starts."""
    let_next_start(IS_DEPENDENT)
    head, item = tl.program_id(0), tl.program_id(1)
    seq, split = item, 0
    is_split = False
    if HAS_PARTIALS:
        is_split = item < num_split_seqs * num_splits
        if is_split:  # most are not, and start without these divisions
            seq = item // num_splits
            split = item - seq * num_splits
        else:
            seq = item - num_split_seqs * (num_splits - 1)
    context_len = tl.load(context_lens + seq)
    table = block_tables + tl.load(slots + seq).to(tl.int64) * table_stride
    wait_for_kernels_before(IS_DEPENDENT)
    if context_len == 0:  # padding
        return
    first = 0
    if HAS_WINDOW:
        first = first_seen(context_len - 1, window, SLIDES)
    begin = first // TILE * TILE
    shared_len = 0
    if HAS_SHARED:
        shared_len = tl.load(shared_lens + seq)
        begin = shared_len
    end = context_len
    count = 1  # splits of this sequence's own context
    if is_split:
        count, per_split = own_splits(context_len - begin, min_split, num_splits, TILE)
        if split >= count:
            return
        begin = begin + split * per_split
        end = tl.minimum(context_len, begin + per_split)

    rows = tl.arange(0, GROUP_BLOCK)
    dims = tl.arange(0, DIM_BLOCK)
    is_head = (rows[:, None] < GROUP) & (dims[None, :] < HEAD_DIM)
    at = q + seq.to(tl.int64) * q_stride + (head * GROUP + rows[:, None]) * HEAD_DIM + dims[None, :]
    query = in_dot_dtype(tl.load(at, mask=is_head, other=0.0), keys)

    highest = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    if IN_PAIRS:
        columns = tl.arange(0, DIM_BLOCK // 2)
        firsts = tl.zeros([GROUP_BLOCK, DIM_BLOCK // 2], tl.float32)
        seconds = tl.zeros([GROUP_BLOCK, DIM_BLOCK // 2], tl.float32)
    else:
        mixed = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
    scale = scale_of_head(scale, keys, key_units, head)
    tokens = tl.arange(0, TILE)
    query_positions = tl.zeros([GROUP_BLOCK], tl.int32) + (context_len - 1)
    slope = tl.zeros([GROUP_BLOCK], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + head * GROUP + rows, mask=rows < GROUP, other=0.0)
    for start in tl.range(begin, end, TILE):
        position = start + tokens
        is_known = position < end
        block = tl.load(table + position // BLOCK_SIZE, mask=is_known, other=0).to(tl.int64)
        line = ((block * NUM_KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
        if DIM_BLOCK == HEAD_DIM:
            is_inside = is_known[:, None]
        else:
            is_inside = is_known[:, None] & (dims[None, :] < HEAD_DIM)
        key = tl.load(keys + line[:, None] + dims[None, :], mask=is_inside, other=0.0)
        if IN_PAIRS:
            is_pair = is_known[:, None]
            if DIM_BLOCK != HEAD_DIM:
                is_pair = is_known[:, None] & (columns[None, :] < HEAD_DIM // 2)
            value = tl.load(values + (line // 2)[:, None] + columns[None, :], mask=is_pair, other=0)
        else:
            value = tl.load(values + line[:, None] + dims[None, :], mask=is_inside, other=0.0)
        score = tl.dot(query, tl.trans(key_in(query.dtype, key, IS_INTERPRETED))) * scale
        if HAS_SOFTCAP:
            score = cap_softly(score, softcap)
        if HAS_SLOPES:
            score = add_bias(score, slope, query_positions, position)
        is_seen = is_known
        if HAS_WINDOW:
            is_seen = is_known & (position >= first)
        score = tl.where(is_seen[None, :], score, float("-inf"))
        peak, total, weight, shrink = softmax_step(highest, total, score)
        weight = weight.to(query.dtype)
        if IN_PAIRS:
            firsts = firsts * shrink[:, None] + tl.dot(weight, widen_fp8(value, False, IS_INTERPRETED))
            seconds = seconds * shrink[:, None] + tl.dot(weight, widen_fp8(value, True, IS_INTERPRETED))
        else:
            mixed = mixed * shrink[:, None] + tl.dot(weight, value)
        highest = peak

    if IN_PAIRS:
        mixed = tl.interleave(firsts, seconds)
    # The first partial result of each query head.
    place = (seq.to(tl.int64) * NUM_HEADS + head * GROUP + rows) * num_partials
    if HAS_PARTIALS and count > 1:
        mine = place + split
        tl.store(partial + mine[:, None] * HEAD_DIM + dims[None, :], mixed, mask=is_head)
        tl.store(sums + mine * 2, highest, mask=rows < GROUP)
        tl.store(sums + mine * 2 + 1, total, mask=rows < GROUP)
        tl.debug_barrier()  # the whole program has stored its partial result before it counts as arrived
        arrival = arrivals + seq * NUM_KV_HEADS + head
        if tl.atomic_add(arrival, 1, sem="acq_rel") < count - 1:
            return
        tl.store(arrival, 0)  # the next kernel expects zeros
        for first_other in range(0, count, MERGED_TOGETHER):
            # Their loads are issued together: one after the other, each would wait for the one before.
            for step in tl.static_range(MERGED_TOGETHER):
                other = first_other + step
                is_mine = (rows < GROUP) & (other < count) & (other != split)
                highest, total, mixed = merge_partial(
                    highest,
                    total,
                    mixed,
                    partial,
                    sums,
                    place + other,
                    is_mine,
                    is_mine[:, None] & is_head,
                    dims,
                    HEAD_DIM,
                )
    if HAS_SHARED:
        is_mine = (rows < GROUP) & (shared_len > 0)
        for index in tl.static_range(SHARED_SPLITS):
            common = place + num_splits + index
            highest, total, mixed = merge_partial(
                highest, total, mixed, partial, sums, common, is_mine, is_mine[:, None] & is_head, dims, HEAD_DIM
            )
    if HAS_SINKS:
        sink = tl.load(sinks + head * GROUP + rows, mask=rows < GROUP, other=0.0)
        total, mixed = add_sink(highest, total, mixed, sink)
    at = out + (seq.to(tl.int64) * NUM_HEADS + head * GROUP + rows[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_head)


@triton.jit
def own_splits(length, min_split, num_splits, TILE: tl.constexpr):
    """Returns how many splits a context has, none of them empty, and the most tokens of one."""
    length = tl.maximum(length, 1)
    count = tl.minimum(num_splits, tl.cdiv(length, min_split))
    per_split = tl.cdiv(tl.cdiv(length, count), TILE) * TILE
    return tl.cdiv(length, per_split), per_split


@triton.jit
def merge_partial(highest, total, mixed, partial, sums, place, is_row, is_inside, dims, HEAD_DIM: tl.constexpr):
    """Merges a partial result that another program stored, which may be empty. The loads bypass the L1 cache, which
    is not coherent, and do not wait for each other."""
    weight = tl.load(sums + place * 2 + 1, mask=is_row, other=0.0, cache_modifier=".cg")
    other = tl.load(sums + place * 2, mask=is_row, other=float("-inf"), cache_modifier=".cg")
    line = partial + place[:, None] * HEAD_DIM + dims[None, :]
    value = tl.load(line, mask=is_inside, other=0.0, cache_modifier=".cg")
    is_there = weight > 0.0
    other = tl.where(is_there, other, float("-inf"))
    peak = tl.maximum(highest, other)
    floor = tl.where(peak == float("-inf"), 0.0, peak)
    shrink, grow = tl.exp2(highest - floor), tl.exp2(other - floor)
    total = total * shrink + tl.where(is_there, weight, 0.0) * grow
    mixed = mixed * shrink[:, None] + tl.where(is_there[:, None], value, 0.0) * grow[:, None]
    return peak, total, mixed
