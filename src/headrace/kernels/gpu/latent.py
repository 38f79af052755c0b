"""Multi-head latent attention over a cache of latents: one head of R + rotary_dim dimensions for all query heads.

    rows      (token, query head) pairs of one sequence, ROWS of them per program
    keys      latents [tokens, R] and rotated parts [tokens, rotary_dim], beside each other in the cache
    values    the latents again: a tile of them is read once for scores and sums

A program computes a decode, or one split of its context, or ROWS rows of a prefill's tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.attention_loop import LOG2E, in_dot_dtype, softmax_step
from headrace.kernels.gpu.decode_attention import merge_partial, own_splits
from headrace.kernels.gpu.shared_memory import shared_memory_bytes
from headrace.kernels.layout import LayerCache, StepLayout

_TILE_TOKENS = 128  # as in `runner/gpu/tiles.py`
_SPARE_BYTES = 8 * 1024  # of shared memory, for what is neither queries nor keys


def allocate_latent_cache(
    num_blocks: int, block_size: int, rank: int, rotary_dim: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """Returns a zeroed cache, as `allocate_cache` does."""
    keys = torch.zeros((num_blocks, 1, block_size, rank + rotary_dim), dtype=dtype, device=device)
    return LayerCache.of_latents(keys, rank)


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Tile sizes and launch parameters."""

    rows: int  # of a program; of a decode, query heads of one token
    keys: int  # per loop iteration
    num_warps: int
    num_stages: int


def latent_shape(num_heads: int) -> LatentShape:
    """Returns the best of a small sweep on an H200, 2026-11-17 (`benchmarks/latent_attention.py`)."""
    return LatentShape(16, 32, 4, 2) if num_heads <= 16 else LatentShape(32, 64, 8, 2)


def programs_per_decode(num_heads: int) -> int:
    return int(triton.cdiv(num_heads, latent_shape(num_heads).rows))


def rope_and_store_latent(
    q: Tensor,  # [T, Hq, R + rotary_dim]
    latents: Tensor,  # [T, R]
    rotary_keys: Tensor,  # [T, rotary_dim], rows of any stride
    layout: StepLayout,
    cos_sin: Tensor,  # [max_len, rotary_dim] float32
    cache: LayerCache,
) -> None:
    """See `ops.rope_and_store_latent`."""
    num_tokens, num_heads, _ = q.shape
    rank, rotary_dim = latents.shape[1], rotary_keys.shape[1]
    assert q.is_contiguous() and latents.is_contiguous() and rotary_keys.stride(1) == 1
    if num_tokens:
        _rope_and_store_latent[(num_tokens,)](
            q,
            latents,
            rotary_keys,
            layout.positions,
            layout.slot_mapping,
            cos_sin,
            cache.keys,
            rotary_keys.stride(0),
            NUM_HEADS=num_heads,
            RANK=rank,
            ROTARY=rotary_dim,
            HEADS_BLOCK=triton.next_power_of_2(num_heads),
            RANK_BLOCK=triton.next_power_of_2(rank),
            HALF_BLOCK=triton.next_power_of_2(rotary_dim // 2),
            num_warps=4,
        )


@triton.jit
def _rope_and_store_latent(
    q,
    latents,
    rotary_keys,
    positions,
    slot_mapping,
    cos_sin,
    keys,
    rotary_stride,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """Computes one token. The key is stored as [latent, first half, second half of what rotates]."""
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = ROTARY // 2
    dims = tl.arange(0, HALF_BLOCK)
    is_dim = dims < half
    angles = cos_sin + tl.load(positions + token) * ROTARY
    cos = tl.load(angles + dims, mask=is_dim, other=0.0)
    sin = tl.load(angles + half + dims, mask=is_dim, other=0.0)

    heads = tl.arange(0, HEADS_BLOCK)
    inside = (heads[:, None] < NUM_HEADS) & is_dim[None, :]
    at = q + (token * NUM_HEADS + heads[:, None]) * (RANK + ROTARY) + RANK + dims[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (first * cos[None, :] - second * sin[None, :]).to(q.dtype.element_ty), mask=inside)
    tl.store(at + half, (second * cos[None, :] + first * sin[None, :]).to(q.dtype.element_ty), mask=inside)

    key = keys + tl.load(slot_mapping + token) * (RANK + ROTARY)
    ranks = tl.arange(0, RANK_BLOCK)
    latent = tl.load(latents + token * RANK + ranks, mask=ranks < RANK, other=0.0)
    tl.store(key + ranks, latent.to(keys.dtype.element_ty), mask=ranks < RANK)
    at = rotary_keys + token * rotary_stride + dims
    first = tl.load(at, mask=is_dim, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=is_dim, other=0.0).to(tl.float32)
    tl.store(key + RANK + dims, (first * cos - second * sin).to(keys.dtype.element_ty), mask=is_dim)
    tl.store(key + RANK + half + dims, (second * cos + first * sin).to(keys.dtype.element_ty), mask=is_dim)


def latent_attention(
    q: Tensor,  # [T, Hq, R + rotary_dim], contiguous
    cache: LayerCache,
    layout: StepLayout,
    scale: float,
) -> Tensor:  # [T, Hq, R]
    """See `ops.latent_attention`."""
    num_tokens, num_heads, _ = q.shape
    assert q.is_contiguous()
    out = torch.empty((num_tokens, num_heads, cache.values.shape[3]), dtype=q.dtype, device=q.device)
    if layout.num_decodes:
        _decode_latents(q, cache, layout, out, scale)
    if layout.num_seqs > layout.num_decodes:
        _prefill_latents(q, cache, layout, out, scale)
    return out


def _decode_latents(q: Tensor, cache: LayerCache, layout: StepLayout, out: Tensor, scale: float) -> None:
    """Computes the first `num_decodes` sequences. Splits and their partial results are those of `decode_attention`."""
    num_seqs, num_heads, num_splits = layout.num_decodes, q.shape[1], layout.splits.num_splits
    num_split_seqs = num_seqs if layout.splits.num_seqs is None else min(num_seqs, layout.splits.num_seqs)
    num_split_seqs = 0 if num_splits == 1 else num_split_seqs
    num_programs = programs_per_decode(num_heads)
    partial, sums, arrivals = q, q, layout.splits.arrivals
    if num_splits > 1:
        shape = (num_split_seqs, num_heads, num_splits)
        partial = torch.empty((*shape, out.shape[2]), dtype=torch.float32, device=q.device)
        sums = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
        if arrivals is None:
            arrivals = torch.zeros(num_split_seqs * num_programs, dtype=torch.int32, device=q.device)
        assert arrivals.dtype == torch.int32 and arrivals.numel() >= num_split_seqs * num_programs
    num_items = num_split_seqs * num_splits + num_seqs - num_split_seqs  # all splits of the split contexts come first
    _latent_decode[(num_programs, num_items)](
        q,
        cache.keys,
        layout.block_tables,
        layout.slots,
        layout.context_lens,
        out,
        partial,
        sums,
        q if arrivals is None else arrivals,
        layout.block_tables.stride(0),
        scale * LOG2E,
        layout.splits.min_tokens,
        num_splits,
        num_split_seqs,
        HAS_PARTIALS=num_splits > 1,
        **_sizes(q, cache),
    )


def _prefill_latents(q: Tensor, cache: LayerCache, layout: StepLayout, out: Tensor, scale: float) -> None:
    assert layout.tiles is not None, "a step with prefills needs their tiles"
    num_programs = triton.cdiv(_TILE_TOKENS * q.shape[1], latent_shape(q.shape[1]).rows)
    _latent_prefill[(num_programs, layout.tiles.shape[0])](
        q,
        cache.keys,
        layout.block_tables,
        layout.slots,
        layout.context_lens,
        layout.query_starts,
        layout.tiles,
        out,
        layout.block_tables.stride(0),
        scale * LOG2E,
        TILE_TOKENS=_TILE_TOKENS,
        **_sizes(q, cache),
    )


def _sizes(q: Tensor, cache: LayerCache) -> dict[str, int]:
    """Returns what both kernels are specialized for, and their launch parameters."""
    rank = cache.values.shape[3]
    rotary_dim, shape = q.shape[2] - rank, latent_shape(q.shape[1])
    return {
        "NUM_HEADS": q.shape[1],
        "RANK": rank,
        "ROTARY": rotary_dim,
        "RANK_BLOCK": max(16, triton.next_power_of_2(rank)),
        "ROTARY_BLOCK": max(16, triton.next_power_of_2(rotary_dim)),
        "BLOCK_SIZE": cache.block_size,
        "ROWS": shape.rows,
        "KEYS": _fitting_keys(shape, q.shape[2] * q.element_size(), shared_memory_bytes(q.device)),
        "num_warps": shape.num_warps,
        "num_stages": shape.num_stages,
    }


def _fitting_keys(shape: LatentShape, row_bytes: int, max_bytes: int) -> int:
    """Returns the keys per loop iteration: fewer where shared memory does not hold them beside the queries."""
    keys = shape.keys
    while keys > 16 and (shape.rows + keys) * row_bytes + _SPARE_BYTES > max_bytes:
        keys //= 2
    return keys


@triton.jit
def _attend(
    q,
    keys,
    table,
    line,
    is_row,
    positions,
    begin,
    end,
    scale,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ROTARY_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Runs the rows whose queries are at `line` over the keys from `begin` to `end`; a row sees those up to its
    position. Returns for each row the largest score, the sum of the weights relative to it, and the latents weighted by
    them."""
    ranks, turns, tokens = tl.arange(0, RANK_BLOCK), tl.arange(0, ROTARY_BLOCK), tl.arange(0, KEYS)
    is_rank, is_turn = ranks < RANK, turns < ROTARY
    query = tl.load(q + line[:, None] + ranks[None, :], mask=is_row[:, None] & is_rank[None, :], other=0.0)
    turned = tl.load(q + line[:, None] + RANK + turns[None, :], mask=is_row[:, None] & is_turn[None, :], other=0.0)
    query, turned = in_dot_dtype(query, keys), in_dot_dtype(turned, keys)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, RANK_BLOCK], tl.float32)
    for start in tl.range(begin, end, KEYS):
        position = start + tokens
        is_known = position < end
        block = tl.load(table + position // BLOCK_SIZE, mask=is_known, other=0).to(tl.int64)
        at = keys + ((block * BLOCK_SIZE + position % BLOCK_SIZE) * (RANK + ROTARY))[:, None]
        latent = tl.load(at + ranks[None, :], mask=is_known[:, None] & is_rank[None, :], other=0.0).to(query.dtype)
        key = tl.load(at + RANK + turns[None, :], mask=is_known[:, None] & is_turn[None, :], other=0.0)
        score = tl.dot(query, tl.trans(latent))
        score = (score + tl.dot(turned, tl.trans(key.to(query.dtype)))) * scale
        is_seen = is_known[None, :] & (position[None, :] <= positions[:, None])
        score = tl.where(is_seen, score, float("-inf"))
        peak, total, weight, shrink = softmax_step(highest, total, score)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(query.dtype), latent)
        highest = peak
    return highest, total, mixed


@triton.jit(do_not_specialize=["min_split", "num_splits", "num_split_seqs"])
def _latent_decode(
    q,
    keys,
    block_tables,
    slots,
    context_lens,
    out,
    partial,
    sums,
    arrivals,
    table_stride,
    scale,
    min_split,
    num_splits,
    num_split_seqs,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ROTARY_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_PARTIALS: tl.constexpr,
):
    program, item = tl.program_id(0), tl.program_id(1)
    seq, split = item, 0
    is_split = False
    if HAS_PARTIALS:
        is_split = item < num_split_seqs * num_splits
        if is_split:
            seq = item // num_splits
            split = item - seq * num_splits
        else:
            seq = item - num_split_seqs * (num_splits - 1)
    context_len = tl.load(context_lens + seq)
    if context_len == 0:  # padding
        return
    begin, end = 0, context_len
    count = 1
    if is_split:
        count, per_split = own_splits(context_len, min_split, num_splits, KEYS)
        if split >= count:
            return
        begin = split * per_split
        end = tl.minimum(context_len, begin + per_split)

    heads = program * ROWS + tl.arange(0, ROWS)
    is_row = heads < NUM_HEADS
    row = seq.to(tl.int64) * NUM_HEADS + heads
    table = block_tables + tl.load(slots + seq).to(tl.int64) * table_stride
    positions = tl.zeros([ROWS], tl.int32) + (context_len - 1)
    highest, total, mixed = _attend(
        q, keys, table, row * (RANK + ROTARY), is_row, positions, begin, end, scale,
        RANK, ROTARY, RANK_BLOCK, ROTARY_BLOCK, BLOCK_SIZE, ROWS, KEYS,
    )  # fmt: skip
    ranks = tl.arange(0, RANK_BLOCK)
    is_inside = is_row[:, None] & (ranks[None, :] < RANK)
    if HAS_PARTIALS and count > 1:
        place = row * num_splits
        mine = place + split
        tl.store(partial + mine[:, None] * RANK + ranks[None, :], mixed, mask=is_inside)
        tl.store(sums + mine * 2, highest, mask=is_row)
        tl.store(sums + mine * 2 + 1, total, mask=is_row)
        tl.debug_barrier()  # the whole program has stored its partial result before it counts as arrived
        arrival = arrivals + seq * tl.num_programs(0) + program
        if tl.atomic_add(arrival, 1, sem="acq_rel") < count - 1:
            return
        tl.store(arrival, 0)  # the next kernel expects zeros
        for other in range(count):
            if other != split:
                highest, total, mixed = merge_partial(
                    highest, total, mixed, partial, sums, place + other, is_row, is_inside, ranks, RANK
                )
    at = out + row[:, None] * RANK + ranks[None, :]
    tl.store(at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _latent_prefill(
    q,
    keys,
    block_tables,
    slots,
    context_lens,
    query_starts,
    tiles,
    out,
    table_stride,
    scale,
    TILE_TOKENS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ROTARY_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    program, tile = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tiles + tile * 2)
    offset = tl.load(tiles + tile * 2 + 1)  # first token of the tile among the step's tokens of this sequence
    query_start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - query_start
    num_tokens = tl.minimum(query_len - offset, TILE_TOKENS)
    if program * ROWS >= num_tokens * NUM_HEADS:  # also padding
        return
    context_len = tl.load(context_lens + seq)
    first_position = context_len - query_len + offset

    pairs = program * ROWS + tl.arange(0, ROWS)
    is_row = pairs < num_tokens * NUM_HEADS
    row = (query_start + offset).to(tl.int64) * NUM_HEADS + pairs
    positions = first_position + pairs // NUM_HEADS
    last = tl.minimum((program * ROWS + ROWS - 1) // NUM_HEADS, num_tokens - 1)
    table = block_tables + tl.load(slots + seq).to(tl.int64) * table_stride
    _, total, mixed = _attend(
        q, keys, table, row * (RANK + ROTARY), is_row, positions, 0, first_position + last + 1, scale,
        RANK, ROTARY, RANK_BLOCK, ROTARY_BLOCK, BLOCK_SIZE, ROWS, KEYS,
    )  # fmt: skip
    ranks = tl.arange(0, RANK_BLOCK)
    at = out + row[:, None] * RANK + ranks[None, :]
    is_inside = is_row[:, None] & (ranks[None, :] < RANK)
    tl.store(at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_inside)
