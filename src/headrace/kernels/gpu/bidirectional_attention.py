"""Attention of encoders: one program computes one head for a tile of tokens of a text, over the packed QKV."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, empty

from headrace.kernels.gpu import flash
from headrace.kernels.gpu.attention_loop import LOG2E
from headrace.kernels.layout import PackedLayout


def _shape(dim_block: int, rows: int) -> tuple[int, int, int]:
    """Returns keys per loop iteration, warps and stages. Not swept: as in `prefill_attention`, with fewer warps for
    small tiles."""
    if dim_block >= 256:
        return 32, 8, 2
    return 64, (8 if dim_block >= 128 and rows >= 128 else 4), 2


def bidirectional_attention(
    qkv: Tensor,  # [T, 3 * H * D]
    layout: PackedLayout,
    num_heads: int,
    scale: float,
    reach: int | None = None,
) -> Tensor:  # [T, H * D]
    head_dim, longest = qkv.shape[1] // (3 * num_heads), max(layout.lens)
    sees_all = reach is None or reach >= longest - 1
    if layout.uses_flash and sees_all and flash.is_made_for(qkv.dtype, head_dim, qkv.device):
        return flash.bidirectional(qkv, layout.starts, longest, num_heads, scale)
    assert layout.tiles is not None, "a step on a GPU needs tiles"
    out = empty(qkv.shape[0], num_heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    dim_block = max(16, triton.next_power_of_2(head_dim))
    num_keys, num_warps, num_stages = _shape(dim_block, layout.tile_rows)
    _bidirectional[(num_heads, layout.tiles.shape[0])](
        qkv,
        layout.starts,
        layout.tiles,
        out,
        scale * LOG2E,
        0 if reach is None else reach,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        DIM_BLOCK=dim_block,
        ROWS=layout.tile_rows,
        KEYS=num_keys,
        HAS_REACH=not sees_all,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out


@triton.jit(do_not_specialize=["reach"])
def _bidirectional(
    qkv,
    starts,
    tiles,
    out,
    scale,
    reach,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_REACH: tl.constexpr,
):
    head, tile = tl.program_id(0), tl.program_id(1)
    text = tl.load(tiles + tile * 2)
    offset = tl.load(tiles + tile * 2 + 1)  # first token of the tile in its text
    start = tl.load(starts + text).to(tl.int64)
    text_len = (tl.load(starts + text + 1) - start).to(tl.int32)

    rows = offset + tl.arange(0, ROWS)
    tokens = tl.arange(0, KEYS)
    dims = tl.arange(0, DIM_BLOCK)
    row_len: tl.constexpr = 3 * NUM_HEADS * HEAD_DIM
    lines = qkv + start * row_len + head * HEAD_DIM + dims[None, :]
    is_query = (rows[:, None] < text_len) & (dims[None, :] < HEAD_DIM)
    query = tl.load(lines + rows[:, None] * row_len, mask=is_query, other=0.0)

    begin, end = 0, text_len
    if HAS_REACH:
        begin = tl.maximum(0, offset - reach) // KEYS * KEYS
        end = tl.minimum(text_len, offset + ROWS + reach)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM_BLOCK], tl.float32)
    for first in tl.range(begin, end, KEYS):
        at = first + tokens
        is_inside = (at[:, None] < text_len) & (dims[None, :] < HEAD_DIM)
        side = lines + at[:, None] * row_len
        key = tl.load(side + NUM_HEADS * HEAD_DIM, mask=is_inside, other=0.0)
        value = tl.load(side + 2 * NUM_HEADS * HEAD_DIM, mask=is_inside, other=0.0)
        score = tl.dot(query, tl.trans(key)) * scale
        is_seen = at[None, :] < text_len
        if HAS_REACH:
            distance = rows[:, None] - at[None, :]
            is_seen = is_seen & (distance <= reach) & (distance >= -reach)
        score = tl.where(is_seen, score, float("-inf"))
        peak = tl.maximum(highest, tl.max(score, axis=1))
        floor = tl.where(peak == float("-inf"), 0.0, peak)
        weight = tl.exp2(score - floor[:, None])
        shrink = tl.exp2(highest - floor)
        total = total * shrink + tl.sum(weight, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(query.dtype), value)
        highest = peak
    place = out + (start + rows[:, None]) * NUM_HEADS * HEAD_DIM + head * HEAD_DIM + dims[None, :]
    total = tl.where(total == 0.0, 1.0, total)  # rows after the text may have seen nothing
    tl.store(place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_query)
