"""Attention of sequences with one token each: one program = one kv head of one sequence (or of a part of its context),
whose query heads are the rows of its products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.attend import LOG2E, NO_WINDOW, first_seen, in_type_of_product, widened
from headrace.kernels.gpu.shared_attention import SHARED_PARTS, shared_attention
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
) -> None:
    """The first `num_single` sequences, which have one token each.

    A long context is cut into parts, and so is every one when there are few sequences; beginnings that several
    sequences share are parts of their own, computed for all of them at once. Whoever ends a sequence's last part merges
    all of them by their weights.
    """
    num_seqs, num_heads, head_dim = layout.num_single, q.shape[1], q.shape[2]
    num_kv_heads = cache.keys.shape[1]
    shared = layout.shared if window is None else None
    num_splits = layout.splits.num_parts
    num_cut = num_seqs if layout.splits.num_seqs is None else min(num_seqs, layout.splits.num_seqs)
    num_cut = 0 if num_splits == 1 else num_cut
    num_parts = num_splits + (SHARED_PARTS if shared is not None else 0)
    partial, sums, arrivals = q, q, layout.splits.arrivals
    if num_parts > 1:
        num_merged = num_cut if shared is None else num_seqs
        partial = torch.empty((num_merged, num_heads, num_parts, head_dim), dtype=torch.float32, device=q.device)
        sums = torch.empty((num_merged, num_heads, num_parts, 2), dtype=torch.float32, device=q.device)
        if arrivals is None:
            arrivals = torch.zeros(num_cut * num_kv_heads, dtype=torch.int32, device=q.device)
        assert arrivals.dtype == torch.int32 and arrivals.numel() >= num_cut * num_kv_heads
    common = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "DIM_BLOCK": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": cache.block_size,
        "HAS_SOFTCAP": softcap is not None,
    }
    if shared is not None:
        shared_attention(q, cache, layout, shared, partial, sums, scale, softcap, num_splits, **common)
    is_fp8 = cache.keys.element_size() == 1
    tile, num_warps, num_stages = _decode_shape(head_dim, is_fp8=is_fp8)
    _decode[(num_kv_heads, num_cut * num_splits + num_seqs - num_cut)](  # all parts of the first contexts come first
        q,
        cache.keys,
        cache.values.view(torch.int16) if is_fp8 else cache.values,
        layout.block_tables,
        layout.slots,
        layout.context_lens,
        layout.context_lens if shared is None else shared.lens,
        out,
        partial,
        sums,
        q if arrivals is None else arrivals,
        q.stride(0),
        layout.block_tables.stride(0),
        scale * LOG2E,
        NO_WINDOW if window is None else window,
        0.0 if softcap is None else softcap,
        layout.splits.min_tokens,
        num_splits,
        num_cut,
        num_parts,
        GROUP_BLOCK=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        TILE=tile,
        IS_PART=num_parts > 1,
        HAS_SHARED=shared is not None,
        SHARED_PARTS=SHARED_PARTS,
        HAS_WINDOW=window is not None,
        SLIDES=slides,
        IN_PAIRS=is_fp8,
        IS_INTERPRETED=triton.knobs.runtime.interpret,
        num_warps=num_warps,
        num_stages=num_stages,
        **common,
    )


MAX_SPLITS = 32


def _decode_shape(head_dim: int, *, is_fp8: bool) -> tuple[int, int, int]:
    """Keys a step of the loop, warps and stages: the best of sweeps on an H200, 2026-11-15."""
    if is_fp8:
        return 64, 2, 5
    return (32, 1, 6) if head_dim <= 64 else (64, 2, 3)


@triton.jit(do_not_specialize=["min_split", "num_splits", "num_cut", "num_parts"])
def _decode(
    q,
    keys,
    values,
    block_tables,
    rows,
    context_lens,
    shared_lens,
    out,
    partial,
    sums,
    arrivals,
    q_stride,
    table_stride,
    scale,
    window,
    softcap,
    min_split,
    num_splits,
    num_cut,
    num_parts,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    IS_PART: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    SHARED_PARTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SLIDES: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Values of eight bits come in pairs of dimensions: a GPU can turn tiles of 16-bit words as its products need them,
    but not of bytes."""
    head, item = tl.program_id(0), tl.program_id(1)
    seq, split = item, 0
    is_cut = False
    if IS_PART:
        is_cut = item < num_cut * num_splits
        if is_cut:  # most are not, and need no divisions before they can begin
            seq = item // num_splits
            split = item - seq * num_splits
        else:
            seq = item - num_cut * (num_splits - 1)
    context_len = tl.load(context_lens + seq)
    if context_len == 0:  # a place that nobody has
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
    count = 1  # parts of this sequence's own context
    if is_cut:
        count, per_split = _own_parts(context_len - begin, min_split, num_splits, TILE)
        if split >= count:
            return
        begin = begin + split * per_split
        end = tl.minimum(context_len, begin + per_split)

    lines = tl.arange(0, GROUP_BLOCK)
    dims = tl.arange(0, DIM_BLOCK)
    is_head = (lines[:, None] < GROUP) & (dims[None, :] < HEAD_DIM)
    at = q + seq.to(tl.int64) * q_stride + (head * GROUP + lines[:, None]) * HEAD_DIM + dims[None, :]
    query = in_type_of_product(tl.load(at, mask=is_head, other=0.0), keys)
    table = block_tables + tl.load(rows + seq).to(tl.int64) * table_stride

    highest = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    if IN_PAIRS:
        columns = tl.arange(0, DIM_BLOCK // 2)
        firsts = tl.zeros([GROUP_BLOCK, DIM_BLOCK // 2], tl.float32)
        seconds = tl.zeros([GROUP_BLOCK, DIM_BLOCK // 2], tl.float32)
    else:
        mixed = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
    tokens = tl.arange(0, TILE)
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
        score = tl.dot(query, tl.trans(key.to(query.dtype))) * scale
        if HAS_SOFTCAP:
            capped = score * (0.6931471805599453 / softcap)
            score = softcap * 1.4426950408889634 * (1.0 - 2.0 / (tl.exp(2.0 * capped) + 1.0))
        is_seen = is_known
        if HAS_WINDOW:
            is_seen = is_known & (position >= first)
        score = tl.where(is_seen[None, :], score, float("-inf"))
        peak = tl.maximum(highest, tl.max(score, axis=1))
        floor = tl.where(peak == float("-inf"), 0.0, peak)
        weight = tl.exp2(score - floor[:, None])
        shrink = tl.exp2(highest - floor)
        total = total * shrink + tl.sum(weight, axis=1)
        weight = weight.to(query.dtype)
        if IN_PAIRS:
            firsts = firsts * shrink[:, None] + tl.dot(weight, widened(value, False, IS_INTERPRETED))
            seconds = seconds * shrink[:, None] + tl.dot(weight, widened(value, True, IS_INTERPRETED))
        else:
            mixed = mixed * shrink[:, None] + tl.dot(weight, value)
        highest = peak

    if IN_PAIRS:
        mixed = tl.interleave(firsts, seconds)
    place = (seq.to(tl.int64) * NUM_HEADS + head * GROUP + lines) * num_parts  # of each query head's parts
    if IS_PART and count > 1:
        mine = place + split
        tl.store(partial + mine[:, None] * HEAD_DIM + dims[None, :], mixed, mask=is_head)
        tl.store(sums + mine * 2, highest, mask=lines < GROUP)
        tl.store(sums + mine * 2 + 1, total, mask=lines < GROUP)
        tl.debug_barrier()  # the whole program has stored its part before it says so
        arrival = arrivals + seq * NUM_KV_HEADS + head
        if tl.atomic_add(arrival, 1, sem="acq_rel") < count - 1:
            return
        tl.store(arrival, 0)  # as the next kernel wants to find it
        for part in range(count):
            if part != split:
                highest, total, mixed = _with_part(
                    highest, total, mixed, partial, sums, place + part, lines < GROUP, is_head, dims, HEAD_DIM
                )
    if HAS_SHARED:
        is_mine = (lines < GROUP) & (shared_len > 0)
        for index in tl.static_range(SHARED_PARTS):
            common = place + num_splits + index
            highest, total, mixed = _with_part(
                highest, total, mixed, partial, sums, common, is_mine, is_mine[:, None] & is_head, dims, HEAD_DIM
            )
    at = out + (seq.to(tl.int64) * NUM_HEADS + head * GROUP + lines[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_head)


@triton.jit
def _own_parts(length, min_split, num_splits, TILE: tl.constexpr):
    """Into how many parts a context is cut, none of them empty, and the most tokens of one."""
    length = tl.maximum(length, 1)
    count = tl.minimum(num_splits, tl.cdiv(length, min_split))
    per_split = tl.cdiv(tl.cdiv(length, count), TILE) * TILE
    return tl.cdiv(length, per_split), per_split


@triton.jit
def _with_part(highest, total, mixed, partial, sums, place, is_line, is_inside, dims, HEAD_DIM: tl.constexpr):
    """What a program holds merged with a part that another has stored, which may be empty. Read from where all
    processors see the same, and all at once: no load waits for another."""
    weight = tl.load(sums + place * 2 + 1, mask=is_line, other=0.0, cache_modifier=".cg")
    other = tl.load(sums + place * 2, mask=is_line, other=float("-inf"), cache_modifier=".cg")
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
