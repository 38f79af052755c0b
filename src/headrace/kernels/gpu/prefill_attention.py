"""Attention of prefills: one program computes one query head for a tile of up to 128 tokens of a sequence."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.attention_loop import LOG2E, NO_WINDOW, add_sink, attend, first_seen, in_dot_dtype
from headrace.kernels.gpu.e3m4 import scale_of_head
from headrace.kernels.gpu.shared_memory import shared_memory_bytes
from headrace.kernels.layout import LayerCache, StepLayout

_LARGE_BYTES = 104 * 1024  # of shared memory: 32 keys of 256 dimensions, and 128 queries
TILE_ROWS = 128  # as in `runner/gpu/tiles.py`


def _prefill_shape(dim_block: int, max_bytes: int) -> tuple[int, int, int]:
    """Returns keys per loop iteration, warps and stages: the best of a sweep on an H200, 2026-11-15. With less shared
    memory, half of the keys of large heads; not measured."""
    if dim_block >= 256:
        return (32 if max_bytes >= _LARGE_BYTES else 16), 8, 2
    return (128, 8, 3) if dim_block >= 128 else (128, 4, 2)


def prefill_attention(
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
    with_fresh: bool = True,
) -> None:
    """Computes the sequences after the first `num_decodes`, tile by tile; without fresh prefills if these are
    already done."""
    assert layout.tiles is not None, "a step with prefills needs their tiles"
    num_tiles = layout.tiles.shape[0] - (0 if with_fresh else layout.num_fresh_tiles)
    num_heads, head_dim = q.shape[1], q.shape[2]
    dim_block = triton.next_power_of_2(head_dim)
    num_keys, num_warps, num_stages = _prefill_shape(dim_block, shared_memory_bytes(q.device))
    _prefill[(num_heads, num_tiles)](
        q,
        cache.keys,
        cache.values,
        q if cache.key_units is None else cache.key_units,
        layout.block_tables,
        layout.slots,
        layout.context_lens,
        layout.query_starts,
        layout.tiles,
        out,
        q if sinks is None else sinks,
        q if slopes is None else slopes,
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
        ROWS=TILE_ROWS,
        KEYS=num_keys,
        HAS_WINDOW=window is not None,
        SLIDES=slides,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        HAS_SLOPES=slopes is not None,
        IS_INTERPRETED=triton.knobs.runtime.interpret,
        num_warps=num_warps,
        num_stages=num_stages,
    )


@triton.jit
def _prefill(
    q,
    keys,
    values,
    key_units,
    block_tables,
    slots,
    context_lens,
    query_starts,
    tiles,
    out,
    sinks,
    slopes,
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
    SLIDES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    head, tile = tl.program_id(0), tl.program_id(1)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    seq = tl.load(tiles + tile * 2)
    offset = tl.load(tiles + tile * 2 + 1)  # first token of the tile among the step's tokens of this sequence
    query_start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - query_start
    if offset >= query_len:  # padding
        return
    context_len = tl.load(context_lens + seq)
    first_position = context_len - query_len + offset

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_BLOCK)
    is_query = (offset + rows[:, None] < query_len) & (dims[None, :] < HEAD_DIM)
    at = (query_start + offset + rows).to(tl.int64)
    line = q + at[:, None] * q_stride + head * HEAD_DIM + dims[None, :]
    query = in_dot_dtype(tl.load(line, mask=is_query, other=0.0), keys)
    positions = first_position + rows
    table = block_tables + tl.load(slots + seq).to(tl.int64) * table_stride

    end = tl.minimum(context_len, first_position + ROWS)
    begin = 0
    if HAS_WINDOW:
        begin = first_seen(first_position, window, SLIDES) // KEYS * KEYS
    slope = tl.zeros([ROWS], tl.float32)
    if HAS_SLOPES:
        slope += tl.load(slopes + head)
    highest, total, mixed = attend(
        query,
        keys,
        values,
        table,
        positions,
        begin,
        tl.maximum(begin, (first_position + 1) // KEYS * KEYS),
        end,
        kv_head,
        scale_of_head(scale, keys, key_units, kv_head),
        window,
        softcap,
        slope,
        positions,
        ROWS,
        NUM_KV_HEADS,
        HEAD_DIM,
        DIM_BLOCK,
        BLOCK_SIZE,
        KEYS,
        HAS_WINDOW,
        SLIDES,
        HAS_SOFTCAP,
        HAS_SLOPES,
        IS_INTERPRETED,
    )
    if HAS_SINKS:
        total, mixed = add_sink(highest, total, mixed, tl.load(sinks + head))
    place = out + at[:, None] * NUM_HEADS * HEAD_DIM + head * HEAD_DIM + dims[None, :]
    tl.store(place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_query)
