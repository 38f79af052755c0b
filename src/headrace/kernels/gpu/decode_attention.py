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
    sequences share are parts of their own, computed for all of them at once. The parts are merged by their weights.
    """
    num_seqs, num_heads, head_dim = layout.num_single, q.shape[1], q.shape[2]
    num_kv_heads = cache.keys.shape[1]
    shared = layout.shared if window is None else None
    num_splits = layout.splits.num_parts
    num_cut = num_seqs if layout.splits.num_seqs is None else min(num_seqs, layout.splits.num_seqs)
    num_parts = num_splits + (SHARED_PARTS if shared is not None else 0)
    partial = sums = q
    if num_parts > 1:
        num_merged = num_cut if shared is None else num_seqs
        partial = torch.empty((num_merged, num_heads, num_parts, head_dim), dtype=torch.float32, device=q.device)
        sums = torch.empty((num_merged, num_heads, num_parts, 2), dtype=torch.float32, device=q.device)
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
    tile, num_warps, num_stages = _decode_shape(is_fp8=is_fp8)
    _decode[(num_kv_heads, num_cut * num_splits + num_seqs - num_cut)](  # all parts of the first contexts come first
        q,
        cache.keys,
        cache.values.view(torch.int16) if is_fp8 else cache.values,
        layout.block_tables,
        layout.rows,
        layout.context_lens,
        layout.context_lens if shared is None else shared.lens,
        out,
        partial,
        sums,
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
        HAS_WINDOW=window is not None,
        SLIDES=slides,
        IN_PAIRS=is_fp8,
        IS_INTERPRETED=triton.knobs.runtime.interpret,
        num_warps=num_warps,
        num_stages=num_stages,
        **common,
    )
    if num_parts > 1:
        _merge[(num_merged, num_kv_heads)](
            layout.context_lens,
            layout.context_lens if shared is None else shared.lens,
            partial,
            sums,
            out,
            NO_WINDOW if window is None else window,
            layout.splits.min_tokens,
            num_splits,
            num_cut,
            num_parts,
            NUM_HEADS=num_heads,
            GROUP=num_heads // num_kv_heads,
            GROUP_BLOCK=triton.next_power_of_2(num_heads // num_kv_heads),
            HEAD_DIM=head_dim,
            DIM_BLOCK=triton.next_power_of_2(head_dim),
            PARTS_BLOCK=triton.next_power_of_2(num_parts),
            TILE=tile,
            HAS_SHARED=shared is not None,
            HAS_WINDOW=window is not None,
            SLIDES=slides,
            num_warps=1,
        )


MAX_SPLITS = 32


def _decode_shape(is_fp8: bool) -> tuple[int, int, int]:
    """Keys a step of the loop, warps and stages: the best of sweeps on an H200, 2026-11-15."""
    return (64, 2, 5) if is_fp8 else (64, 2, 3)


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
    if IS_PART:
        is_cut = item < num_cut * num_splits
        seq = tl.where(is_cut, item // num_splits, item - num_cut * (num_splits - 1))
        split = tl.where(is_cut, item % num_splits, 0)
    context_len = tl.load(context_lens + seq)
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
    if IS_PART:
        count, per_split = _own_parts(context_len - begin, min_split, tl.where(is_cut, num_splits, 1), TILE)
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
    at = out + (seq.to(tl.int64) * NUM_HEADS + head * GROUP + lines[:, None]) * HEAD_DIM + dims[None, :]
    if (count == 1) & (shared_len == 0):  # whole: the merge has nothing to do
        tl.store(at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_head)
    else:
        place = (seq.to(tl.int64) * NUM_HEADS + head * GROUP + lines) * num_parts + split
        tl.store(partial + place[:, None] * HEAD_DIM + dims[None, :], mixed, mask=is_head)
        tl.store(sums + place * 2, highest, mask=lines < GROUP)
        tl.store(sums + place * 2 + 1, total, mask=lines < GROUP)


@triton.jit
def _own_parts(length, min_split, num_splits, TILE: tl.constexpr):
    """Into how many parts a context is cut, none of them empty, and the most tokens of one."""
    length = tl.maximum(length, 1)
    count = tl.minimum(num_splits, tl.cdiv(length, min_split))
    per_split = tl.cdiv(tl.cdiv(length, count), TILE) * TILE
    return tl.cdiv(length, per_split), per_split


@triton.jit(do_not_specialize=["min_split", "num_splits", "num_cut", "num_parts"])
def _merge(
    context_lens,
    shared_lens,
    partial,
    sums,
    out,
    window,
    min_split,
    num_splits,
    num_cut,
    num_parts,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SLIDES: tl.constexpr,
):
    """The parts of a context into one, for the query heads of one kv head; what was computed whole stands already."""
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(context_lens + seq)
    if HAS_WINDOW:
        length = length - first_seen(length - 1, window, SLIDES) // TILE * TILE
    shared_len = 0
    if HAS_SHARED:
        shared_len = tl.load(shared_lens + seq)
        length = length - shared_len
    count, _ = _own_parts(length, min_split, tl.where(seq < num_cut, num_splits, 1), TILE)
    if (count == 1) & (shared_len == 0):
        return
    lines = tl.arange(0, GROUP_BLOCK)
    dims = tl.arange(0, DIM_BLOCK)
    parts = tl.arange(0, PARTS_BLOCK)
    place = seq * NUM_HEADS + head * GROUP + lines
    is_there = parts < count
    if HAS_SHARED:
        is_there = is_there | ((parts >= num_splits) & (parts < num_parts) & (shared_len > 0))
    at = sums + (place[:, None] * num_parts + parts[None, :]) * 2
    total = tl.load(at + 1, mask=(lines[:, None] < GROUP) & is_there[None, :], other=0.0)
    highest = tl.load(at, mask=total > 0.0, other=float("-inf"))
    peak = tl.max(highest, axis=1)
    floor = tl.where(peak == float("-inf"), 0.0, peak)
    whole = tl.sum(total * tl.exp2(highest - floor[:, None]), axis=1)
    mixed = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
    for part in range(num_parts):
        if (part < count) | ((part >= num_splits) & (shared_len > 0)):
            line = place * num_parts + part
            has_weight = tl.load(sums + line * 2 + 1, mask=lines < GROUP, other=0.0) > 0.0
            weight = tl.exp2(tl.load(sums + line * 2, mask=has_weight, other=float("-inf")) - floor)
            inside = has_weight[:, None] & (dims[None, :] < HEAD_DIM)
            mixed += weight[:, None] * tl.load(
                partial + line[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0
            )
    answer = (mixed / tl.where(whole > 0.0, whole, 1.0)[:, None]).to(out.dtype.element_ty)
    inside = (lines[:, None] < GROUP) & (dims[None, :] < HEAD_DIM)
    tl.store(out + place[:, None] * HEAD_DIM + dims[None, :], answer, mask=inside)
