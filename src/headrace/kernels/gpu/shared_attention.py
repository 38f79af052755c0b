"""Attention over beginnings that several sequences share: one program = its equal share of all the work.

The work is a row of items, one for each kv head of each tile, each as many steps long as its beginning has tiles of
keys. Every program takes the same number of consecutive steps, wherever they begin and end, so that all end at once;
an item that lies in the shares of several programs has as many parts.

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

from headrace.kernels.gpu.attend import LOG2E, attend, in_type_of_product
from headrace.kernels.layout import LayerCache, SharedPrefixes, StepLayout

SHARED_PARTS = 3  # of an item, at most


@dataclass(frozen=True, slots=True)
class SharedShape:
    rows: int  # query rows of a tile: its sequences times the query heads of a kv head
    keys: int  # of a step
    num_warps: int
    num_stages: int
    programs: int  # on a processor at a time


def shared_shape(head_dim: int, kv_dtype: torch.dtype) -> SharedShape:
    """The best of a sweep on an H200, 2026-11-15."""
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
    sums: Tensor,  # [S, H, P, 2] float32: the largest score, and the sum of the weights under it
    scale: float,
    softcap: float | None,
    first_part: int,
    **common: Any,
) -> None:
    """Of every sequence with a shared beginning SHARED_PARTS parts, from `first_part` on; those that are not needed
    have a sum of 0."""
    num_tiles, num_seqs = shared.tile_seqs.shape
    assert num_tiles <= most_tiles(layout.block_tables.shape[0]), f"{num_tiles} tiles are too many"
    shape = shared_shape(q.shape[2], cache.keys.dtype)
    _shared[(shape.programs * num_processors(q.device),)](
        q,
        cache.keys,
        cache.values,
        layout.block_tables,
        layout.slots,
        shared.tile_seqs,
        shared.tile_lens,
        partial,
        sums,
        num_tiles,
        q.stride(0),
        layout.block_tables.stride(0),
        scale * LOG2E,
        0.0 if softcap is None else softcap,
        first_part,
        partial.shape[2],
        TILES=triton.next_power_of_2(most_tiles(layout.block_tables.shape[0])),  # the same for all steps of an engine
        SEQS=num_seqs,
        ROWS=shape.rows,
        PARTS=SHARED_PARTS,
        KEYS=shape.keys,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **common,
    )


def most_tiles(num_seqs: int) -> int:
    """Of groups of at least four sequences, in tiles that hold at least four: the worst are groups of five."""
    return max(1, num_seqs * 2 // 5)


@cache
def num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@triton.jit(do_not_specialize=["num_tiles", "first_part", "num_parts"])
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
    num_tiles,
    q_stride,
    table_stride,
    scale,
    softcap,
    first_part,
    num_parts,
    TILES: tl.constexpr,
    SEQS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    tiles = tl.arange(0, TILES)
    steps = tl.cdiv(tl.load(tile_lens + tiles, mask=tiles < num_tiles, other=0), KEYS)
    ends = tl.cumsum(steps, axis=0) * NUM_KV_HEADS  # of each tile's items
    num_steps = tl.sum(steps, axis=0) * NUM_KV_HEADS
    # A share of at least half the longest item, so that none has more than three parts.
    share = tl.maximum(tl.cdiv(num_steps, tl.num_programs(0)), tl.cdiv(tl.max(steps, axis=0), PARTS - 1))
    at = tl.program_id(0) * share
    stop = tl.minimum(at + share, num_steps)

    lines = tl.arange(0, ROWS)
    member = lines % GROUP
    dims = tl.arange(0, DIM_BLOCK)
    while at < stop:
        tile = tl.sum((ends <= at).to(tl.int32), axis=0)
        before = tl.sum(tl.where(ends <= at, steps, 0), axis=0) * NUM_KV_HEADS
        length = tl.load(tile_lens + tile)
        num_item_steps = tl.cdiv(length, KEYS)
        head = (at - before) // num_item_steps
        first = (at - before) % num_item_steps
        count = tl.minimum(num_item_steps - first, stop - at)
        part = at // share - (at - first) // share
        begin, end = first * KEYS, tl.minimum(length, (first + count) * KEYS)

        seq = tl.load(tile_seqs + tile * SEQS + lines // GROUP, mask=lines < SEQS * GROUP, other=-1)
        is_row = seq >= 0
        is_query = is_row[:, None] & (dims[None, :] < HEAD_DIM)
        line = tl.maximum(seq, 0).to(tl.int64) * q_stride + (head * GROUP + member) * HEAD_DIM
        query = in_type_of_product(tl.load(q + line[:, None] + dims[None, :], mask=is_query, other=0.0), keys)
        table = block_tables + tl.load(rows + tl.load(tile_seqs + tile * SEQS)).to(tl.int64) * table_stride
        highest, total, mixed = attend(
            query,
            keys,
            values,
            table,
            tl.zeros([ROWS], tl.int32) + (end - 1),  # all of the part is seen, nothing after it
            begin,
            begin + (end - begin) // KEYS * KEYS,
            end,
            head,
            scale,
            0,
            softcap,
            ROWS,
            NUM_KV_HEADS,
            HEAD_DIM,
            DIM_BLOCK,
            BLOCK_SIZE,
            KEYS,
            False,
            True,
            HAS_SOFTCAP,
        )
        place = (tl.maximum(seq, 0).to(tl.int64) * NUM_HEADS + head * GROUP + member) * num_parts + first_part
        tl.store(partial + (place + part)[:, None] * HEAD_DIM + dims[None, :], mixed, mask=is_query)
        tl.store(sums + (place + part) * 2, highest, mask=is_row)
        tl.store(sums + (place + part) * 2 + 1, total, mask=is_row)
        if first + count == num_item_steps:
            for unused in range(part + 1, PARTS):
                tl.store(sums + (place + unused) * 2 + 1, total * 0.0, mask=is_row)
        at += count
