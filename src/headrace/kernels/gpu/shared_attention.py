"""Attention of decoding sequences over prefixes that several of them share. Every program gets an equal share of the
work.

The work is a list of items: each kv head of each tile of sequences. An item takes as many steps as its prefix has tiles
of keys. Every program computes the same number of consecutive steps, wherever in the list they fall, so all programs
finish together. An item that spans several programs has one split per program.

    items      |  tile 0, head 0  |  tile 0, head 1  |  tile 1, head 0  |  ...
    programs   |      0      |      1      |      2      |      3      |  ...
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.attention_loop import LOG2E, attend, in_dot_dtype
from headrace.kernels.gpu.e3m4 import scale_of_head
from headrace.kernels.layout import LayerCache, SharedPrefixes, StepLayout

SHARED_SPLITS = 3  # most splits of an item


@dataclass(frozen=True, slots=True)
class SharedShape:
    """Tile sizes and launch parameters."""

    rows: int  # query rows of a tile: its sequences times the query heads of a kv head
    keys: int  # per step
    num_warps: int
    num_stages: int
    programs: int  # per multiprocessor at a time


def shared_shape(head_dim: int, kv_dtype: torch.dtype) -> SharedShape:
    """Returns the best of a sweep on an H200, 2026-11-15."""
    if head_dim > 128:
        return SharedShape(64, 32, 4, 2, 1)
    if head_dim > 64 and kv_dtype.itemsize > 1:
        return SharedShape(128, 128, 8, 2, 1)
    return SharedShape(64, 128, 4, 2, 2)


def shared_attention(
    q: Tensor,
    cache: LayerCache,
    layout: StepLayout,
    shared: SharedPrefixes,
    partial: Tensor,  # [S, H, P, D] float32
    sums: Tensor,  # [S, H, P, 2] float32: the largest score, and the sum of the weights relative to it
    scale: float,
    softcap: float | None,
    slopes: Tensor | None,  # [H] float32
    first_partial: int,
    **common: Any,
) -> None:
    """Writes SHARED_SPLITS partial results, from index `first_partial` on, for every sequence with a shared prefix.
    Unused ones have a sum of 0."""
    num_tiles, num_seqs = shared.tile_seqs.shape
    # The same for all steps of an engine; a graph that is padded to more sequences than there are slots has more.
    tiles = max(num_tiles, max_tiles(layout.block_tables.shape[0]))
    shape = shared_shape(q.shape[2], cache.keys.dtype)
    _shared[(shape.programs * num_processors(q.device),)](
        q,
        cache.keys,
        cache.values,
        q if cache.key_units is None else cache.key_units,
        layout.block_tables,
        layout.slots,
        layout.context_lens,
        q if slopes is None else slopes,
        shared.tile_seqs,
        shared.tile_lens,
        partial,
        sums,
        num_tiles,
        q.stride(0),
        layout.block_tables.stride(0),
        scale * LOG2E,
        0.0 if softcap is None else softcap,
        first_partial,
        partial.shape[2],
        TILES=triton.next_power_of_2(tiles),
        SEQS=num_seqs,
        ROWS=shape.rows,
        SPLITS=SHARED_SPLITS,
        KEYS=shape.keys,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **common,
    )


def max_tiles(num_seqs: int) -> int:
    """Returns the most tiles there can be. Groups have at least four sequences and tiles hold at least four, so
    groups of five are the worst case."""
    return max(1, num_seqs * 2 // 5)


@cache
def num_processors(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@triton.jit(do_not_specialize=["num_tiles", "first_partial", "num_partials"])
def _shared(
    q,
    keys,
    values,
    key_units,
    block_tables,
    slots,
    context_lens,
    slopes,
    tile_seqs,
    tile_lens,
    partial,
    sums,
    num_tiles,
    q_stride,
    table_stride,
    scale,
    softcap,
    first_partial,
    num_partials,
    TILES: tl.constexpr,
    SEQS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    tiles = tl.arange(0, TILES)
    steps = tl.cdiv(tl.load(tile_lens + tiles, mask=tiles < num_tiles, other=0), KEYS)
    ends = tl.cumsum(steps, axis=0) * NUM_KV_HEADS  # of each tile's items
    num_steps = tl.sum(steps, axis=0) * NUM_KV_HEADS
    # A share is at least half the longest item, so that no item has more than three splits.
    share = tl.maximum(tl.cdiv(num_steps, tl.num_programs(0)), tl.cdiv(tl.max(steps, axis=0), SPLITS - 1))
    at = tl.program_id(0) * share
    stop = tl.minimum(at + share, num_steps)

    rows = tl.arange(0, ROWS)
    member = rows % GROUP
    dims = tl.arange(0, DIM_BLOCK)
    while at < stop:
        tile = tl.sum((ends <= at).to(tl.int32), axis=0)
        before = tl.sum(tl.where(ends <= at, steps, 0), axis=0) * NUM_KV_HEADS
        length = tl.load(tile_lens + tile)
        num_item_steps = tl.cdiv(length, KEYS)
        head = (at - before) // num_item_steps
        first = (at - before) % num_item_steps
        count = tl.minimum(num_item_steps - first, stop - at)
        split = at // share - (at - first) // share
        begin, end = first * KEYS, tl.minimum(length, (first + count) * KEYS)

        seq = tl.load(tile_seqs + tile * SEQS + rows // GROUP, mask=rows < SEQS * GROUP, other=-1)
        is_row = seq >= 0
        is_query = is_row[:, None] & (dims[None, :] < HEAD_DIM)
        line = tl.maximum(seq, 0).to(tl.int64) * q_stride + (head * GROUP + member) * HEAD_DIM
        query = in_dot_dtype(tl.load(q + line[:, None] + dims[None, :], mask=is_query, other=0.0), keys)
        table = block_tables + tl.load(slots + tl.load(tile_seqs + tile * SEQS)).to(tl.int64) * table_stride
        slope = tl.zeros([ROWS], tl.float32)
        query_positions = tl.zeros([ROWS], tl.int32)
        if HAS_SLOPES:
            slope = tl.load(slopes + head * GROUP + member)
            query_positions = tl.load(context_lens + tl.maximum(seq, 0)) - 1
        highest, total, mixed = attend(
            query,
            keys,
            values,
            table,
            tl.zeros([ROWS], tl.int32) + (end - 1),  # every row sees the whole split and nothing after it
            begin,
            begin + (end - begin) // KEYS * KEYS,
            end,
            head,
            scale_of_head(scale, keys, key_units, head),
            0,
            softcap,
            slope,
            query_positions,
            ROWS,
            NUM_KV_HEADS,
            HEAD_DIM,
            DIM_BLOCK,
            BLOCK_SIZE,
            KEYS,
            False,
            True,
            HAS_SOFTCAP,
            HAS_SLOPES,
            IS_INTERPRETED,
        )
        place = (tl.maximum(seq, 0).to(tl.int64) * NUM_HEADS + head * GROUP + member) * num_partials + first_partial
        tl.store(partial + (place + split)[:, None] * HEAD_DIM + dims[None, :], mixed, mask=is_query)
        tl.store(sums + (place + split) * 2, highest, mask=is_row)
        tl.store(sums + (place + split) * 2 + 1, total, mask=is_row)
        if first + count == num_item_steps:
            for unused in range(split + 1, SPLITS):
                tl.store(sums + (place + unused) * 2 + 1, total * 0.0, mask=is_row)
        at += count
