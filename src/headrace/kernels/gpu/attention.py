"""Attention over the paged cache. Steps have single-token sequences first, then prompts in chunks; each part has its
own kernel:

    decode   one program = one kv head of one sequence (or of a part of its context); its query heads are the rows
    chunks   one program = one query head of a tile of up to 128 tokens of one sequence, causal
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.layout import LayerCache, StepLayout

NO_WINDOW = 1 << 30
LOG2E = 1.4426950408889634


def allocate_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """Zeroed: slots of a block that hold no token yet are multiplied by zero weights, and must be finite."""
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    return LayerCache(
        keys=torch.zeros(shape, dtype=dtype, device=device), values=torch.zeros(shape, dtype=dtype, device=device)
    )


def paged_attention(
    q: Tensor,  # [T, Hq, D], heads contiguous
    cache: LayerCache,
    layout: StepLayout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:  # [T, Hq * D]
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if layout.num_single:
        decode_attention(q, cache, layout, out, scale, window, softcap)
    if layout.num_single < layout.num_seqs:
        chunk_attention(q, cache, layout, out, scale, window, softcap)
    return out.flatten(1)


def decode_attention(
    q: Tensor,
    cache: LayerCache,
    layout: StepLayout,
    out: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """The first `num_single` sequences, which have one token each.

    A context is cut into parts when there are few sequences, and beginnings that several sequences share are parts of
    their own, computed for all of them at once; the parts are merged by their weights.
    """
    num_seqs, num_heads, head_dim = layout.num_single, q.shape[1], q.shape[2]
    num_kv_heads = cache.keys.shape[1]
    shared = layout.shared if window is None else None
    num_splits = layout.num_splits
    num_parts = num_splits + (SHARED_SPLITS if shared is not None else 0)
    partial = sums = q
    if num_parts > 1:
        partial = torch.empty((num_seqs, num_heads, num_parts, head_dim), dtype=torch.float32, device=q.device)
        sums = torch.zeros((num_seqs, num_heads, num_parts, 2), dtype=torch.float32, device=q.device)
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
        _shared[(num_kv_heads, shared.tile_lens.shape[0], SHARED_SPLITS)](
            q,
            cache.keys,
            cache.values,
            layout.block_tables,
            layout.rows,
            shared.tile_seqs,
            shared.tile_lens,
            partial,
            sums,
            q.stride(0),
            layout.block_tables.stride(0),
            scale * LOG2E,
            0.0 if softcap is None else softcap,
            num_splits,
            num_parts,
            SEQS=shared.tile_seqs.shape[1],
            GROUP_BLOCK=SHARED_ROWS // shared.tile_seqs.shape[1],
            KEYS=SHARED_KEYS if head_dim <= 128 else 32,
            num_warps=8,
            num_stages=3 if head_dim <= 128 else 2,
            **common,
        )
    _decode[(num_kv_heads, num_seqs, num_splits)](
        q,
        cache.keys,
        cache.values,
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
        num_splits,
        num_parts,
        GROUP_BLOCK=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        TILE=DECODE_TILE,
        IS_SPLIT=num_splits > 1,
        IS_PART=num_parts > 1,
        HAS_SHARED=shared is not None,
        HAS_WINDOW=window is not None,
        num_warps=DECODE_WARPS,
        num_stages=DECODE_STAGES,
        **common,
    )
    if num_parts > 1:
        _merge[(num_seqs, num_heads)](
            partial,
            sums,
            out,
            num_parts,
            HEAD_DIM=head_dim,
            DIM_BLOCK=triton.next_power_of_2(head_dim),
            PARTS_BLOCK=2 * MAX_SPLITS,
            num_warps=1,
        )


SHARED_ROWS = 128  # query rows of a tile: its sequences times the query heads of a kv head, padded to a power of two
SHARED_KEYS = 64
SHARED_SPLITS = 2


@triton.jit
def _shared(
    q,
    keys,
    values,
    block_tables,
    rows,
    tile_seqs,
    tile_lens,
    partial,
    sums,
    q_stride,
    table_stride,
    scale,
    softcap,
    num_splits,
    num_parts,
    SEQS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """A part of a common beginning, for one kv head of all sequences of a tile."""
    head, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(tile_lens + tile)
    if length > 0:
        lines = tl.arange(0, SEQS * GROUP_BLOCK)
        seq = tl.load(tile_seqs + tile * SEQS + lines // GROUP_BLOCK)
        member = lines % GROUP_BLOCK
        dims = tl.arange(0, DIM_BLOCK)
        is_row = (seq >= 0) & (member < GROUP)
        is_query = is_row[:, None] & (dims[None, :] < HEAD_DIM)
        at = tl.maximum(seq, 0).to(tl.int64) * q_stride + (head * GROUP + member) * HEAD_DIM
        query = tl.load(q + at[:, None] + dims[None, :], mask=is_query, other=0.0)
        table = block_tables + tl.load(rows + tl.load(tile_seqs + tile * SEQS)).to(tl.int64) * table_stride
        per_split = tl.cdiv(tl.cdiv(length, tl.num_programs(2)), KEYS) * KEYS
        begin = split * per_split
        end = tl.minimum(length, begin + per_split)
        highest = tl.full([SEQS * GROUP_BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([SEQS * GROUP_BLOCK], tl.float32)
        mixed = tl.zeros([SEQS * GROUP_BLOCK, DIM_BLOCK], tl.float32)
        positions = tl.zeros([SEQS * GROUP_BLOCK], tl.int32) + (end - 1)  # all of the part is seen, nothing after it
        highest, total, mixed = _attend_keys(
            highest,
            total,
            mixed,
            query,
            keys,
            values,
            table,
            positions,
            begin,
            end,
            head,
            scale,
            0,
            softcap,
            end,
            NUM_KV_HEADS,
            HEAD_DIM,
            DIM_BLOCK,
            BLOCK_SIZE,
            KEYS,
            True,
            False,
            HAS_SOFTCAP,
        )
        place = (tl.maximum(seq, 0).to(tl.int64) * NUM_HEADS + head * GROUP + member) * num_parts + num_splits + split
        tl.store(partial + place[:, None] * HEAD_DIM + dims[None, :], mixed, mask=is_query)
        tl.store(sums + place * 2, highest, mask=is_row)
        tl.store(sums + place * 2 + 1, total, mask=is_row)


DECODE_TILE = 64
DECODE_WARPS = 2
DECODE_STAGES = 3
MAX_SPLITS = 32


@triton.jit
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
    num_splits,
    num_parts,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_PART: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    head, seq, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context_len = tl.load(context_lens + seq)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(0, context_len - window)
    begin = first // TILE * TILE
    if HAS_SHARED:
        begin = tl.load(shared_lens + seq)
    end = context_len
    if IS_SPLIT:
        per_split = tl.cdiv(tl.cdiv(context_len - begin, num_splits), TILE) * TILE
        begin = begin + split * per_split
        end = tl.minimum(context_len, begin + per_split)

    lines = tl.arange(0, GROUP_BLOCK)
    dims = tl.arange(0, DIM_BLOCK)
    is_head = (lines[:, None] < GROUP) & (dims[None, :] < HEAD_DIM)
    at = q + seq.to(tl.int64) * q_stride + (head * GROUP + lines[:, None]) * HEAD_DIM + dims[None, :]
    query = tl.load(at, mask=is_head, other=0.0)
    table = block_tables + tl.load(rows + seq).to(tl.int64) * table_stride

    highest = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
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
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(query.dtype), value.to(query.dtype))
        highest = peak

    if not IS_PART:
        at = out + (seq.to(tl.int64) * NUM_HEADS + head * GROUP + lines[:, None]) * HEAD_DIM + dims[None, :]
        tl.store(at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_head)
    else:
        place = (seq.to(tl.int64) * NUM_HEADS + head * GROUP + lines) * num_parts + split
        tl.store(partial + place[:, None] * HEAD_DIM + dims[None, :], mixed, mask=is_head)
        tl.store(sums + place * 2, highest, mask=lines < GROUP)
        tl.store(sums + place * 2 + 1, total, mask=lines < GROUP)


@triton.jit
def _merge(
    partial,
    sums,
    out,
    num_parts,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
):
    """The parts of one head's context into one. A part that was not computed has a sum of zero and anything else."""
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = seq * tl.num_programs(1) + head
    dims = tl.arange(0, DIM_BLOCK)
    parts = tl.arange(0, PARTS_BLOCK)
    at = sums + (place * num_parts + parts) * 2
    total = tl.load(at + 1, mask=parts < num_parts, other=0.0)
    is_there = total > 0.0
    highest = tl.load(at, mask=is_there, other=float("-inf"))
    peak = tl.max(highest, axis=0)
    whole = tl.sum(total * tl.exp2(highest - peak), axis=0)
    mixed = tl.zeros([DIM_BLOCK], tl.float32)
    for part in range(num_parts):
        share = tl.load(sums + (place * num_parts + part) * 2 + 1)
        if share > 0.0:
            weight = tl.exp2(tl.load(sums + (place * num_parts + part) * 2) - peak)
            line = partial + (place * num_parts + part) * HEAD_DIM + dims
            mixed += weight * tl.load(line, mask=dims < HEAD_DIM, other=0.0)
    tl.store(out + place * HEAD_DIM + dims, (mixed / whole).to(out.dtype.element_ty), mask=dims < HEAD_DIM)


CHUNK_ROWS = 128  # as `runner.tiles` cuts them


def _chunk_shape(dim_block: int) -> tuple[int, int, int]:
    """Keys a step of the loop, warps and stages: the best of a sweep on an H200, 2026-11-15."""
    if dim_block >= 256:
        return 32, 8, 2
    return (128, 8, 3) if dim_block >= 128 else (128, 4, 2)


def chunk_attention(
    q: Tensor,
    cache: LayerCache,
    layout: StepLayout,
    out: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """The sequences after the first `num_single`, by the tiles that the runner has laid out."""
    assert layout.tiles is not None, "a step with chunks needs their tiles"
    num_heads, head_dim = q.shape[1], q.shape[2]
    dim_block = triton.next_power_of_2(head_dim)
    num_keys, num_warps, num_stages = _chunk_shape(dim_block)
    _chunk[(num_heads, layout.tiles.shape[0])](
        q,
        cache.keys,
        cache.values,
        layout.block_tables,
        layout.rows,
        layout.context_lens,
        layout.query_starts,
        layout.tiles,
        out,
        q.stride(0),
        layout.block_tables.stride(0),
        scale * LOG2E,
        NO_WINDOW if window is None else window,
        0.0 if softcap is None else softcap,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=cache.keys.shape[1],
        HEAD_DIM=head_dim,
        DIM_BLOCK=dim_block,
        BLOCK_SIZE=cache.block_size,
        ROWS=CHUNK_ROWS,
        KEYS=num_keys,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        num_warps=num_warps,
        num_stages=num_stages,
    )


@triton.jit
def _chunk(
    q,
    keys,
    values,
    block_tables,
    rows,
    context_lens,
    query_starts,
    tiles,
    out,
    q_stride,
    table_stride,
    scale,
    window,
    softcap,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    head, tile = tl.program_id(0), tl.program_id(1)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    seq = tl.load(tiles + tile * 2)
    offset = tl.load(tiles + tile * 2 + 1)  # first token of the tile within the chunk
    query_start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - query_start
    context_len = tl.load(context_lens + seq)
    first_position = context_len - query_len + offset

    lines = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_BLOCK)
    is_query = (offset + lines[:, None] < query_len) & (dims[None, :] < HEAD_DIM)
    at = (query_start + offset + lines).to(tl.int64)
    query = tl.load(q + at[:, None] * q_stride + head * HEAD_DIM + dims[None, :], mask=is_query, other=0.0)
    positions = first_position + lines
    table = block_tables + tl.load(rows + seq).to(tl.int64) * table_stride

    end = tl.minimum(context_len, first_position + ROWS)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(0, first_position - window + 1) // KEYS * KEYS
    # Tiles of keys that every row sees need no mask; only the last ones, around the diagonal, do.
    full_end = tl.maximum(begin, (first_position + 1) // KEYS * KEYS)

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM_BLOCK], tl.float32)
    if not HAS_WINDOW:
        highest, total, mixed = _attend_keys(
            highest,
            total,
            mixed,
            query,
            keys,
            values,
            table,
            positions,
            begin,
            full_end,
            kv_head,
            scale,
            window,
            softcap,
            end,
            NUM_KV_HEADS,
            HEAD_DIM,
            DIM_BLOCK,
            BLOCK_SIZE,
            KEYS,
            False,
            HAS_WINDOW,
            HAS_SOFTCAP,
        )
        begin = full_end
    highest, total, mixed = _attend_keys(
        highest,
        total,
        mixed,
        query,
        keys,
        values,
        table,
        positions,
        begin,
        end,
        kv_head,
        scale,
        window,
        softcap,
        end,
        NUM_KV_HEADS,
        HEAD_DIM,
        DIM_BLOCK,
        BLOCK_SIZE,
        KEYS,
        True,
        HAS_WINDOW,
        HAS_SOFTCAP,
    )
    place = out + at[:, None] * NUM_HEADS * HEAD_DIM + head * HEAD_DIM + dims[None, :]
    tl.store(place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_query)


@triton.jit
def _attend_keys(
    highest,
    total,
    mixed,
    query,
    keys,
    values,
    table,
    positions,
    begin,
    stop,
    kv_head,
    scale,
    window,
    softcap,
    end,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """One pass over the keys from `begin` to `stop`, KEYS at a time."""
    tokens = tl.arange(0, KEYS)
    dims = tl.arange(0, DIM_BLOCK)
    for start in tl.range(begin, stop, KEYS):
        position = start + tokens
        if IS_MASKED:
            block = tl.load(table + position // BLOCK_SIZE, mask=position < end, other=0).to(tl.int64)
        else:
            block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
        line = ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
        at = line[:, None] + dims[None, :]
        if IS_MASKED or DIM_BLOCK != HEAD_DIM:
            is_inside = (position[:, None] < end) & (dims[None, :] < HEAD_DIM)
            key = tl.load(keys + at, mask=is_inside, other=0.0)
            value = tl.load(values + at, mask=is_inside, other=0.0)
        else:
            key = tl.load(keys + at)
            value = tl.load(values + at)
        score = tl.dot(query, tl.trans(key.to(query.dtype))) * scale
        if HAS_SOFTCAP:
            capped = score * (0.6931471805599453 / softcap)
            score = softcap * 1.4426950408889634 * (1.0 - 2.0 / (tl.exp(2.0 * capped) + 1.0))
        if IS_MASKED:
            is_seen = position[None, :] <= positions[:, None]
            if HAS_WINDOW:
                is_seen = is_seen & (position[None, :] > positions[:, None] - window)
            score = tl.where(is_seen, score, float("-inf"))
        peak = tl.maximum(highest, tl.max(score, axis=1))
        floor = tl.where(peak == float("-inf"), 0.0, peak)
        weight = tl.exp2(score - floor[:, None])
        shrink = tl.exp2(highest - floor)
        total = total * shrink + tl.sum(weight, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(query.dtype), value.to(query.dtype))
        highest = peak
    return highest, total, mixed
