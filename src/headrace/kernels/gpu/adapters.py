"""The low-rank products of adapters (LoRA) in two kernels: down to the rank, and up to the output.

    rows sorted by adapter   | 1 1 1 1 1 | 2 2 | 3 3 3 ...      `AdapterRows`, once per step
    tiles                    |  t0  | t1 | t2  |  t3 ...        TILE_ROWS rows of one adapter; superfluous ones return
    _shrink                  x [rows, K] -> small [splits, rows, P, R] float32, K divided over the splits
    _expand                  sums the splits, multiplies by `up`, and adds to the rows of the output

Nothing depends on values that only the device knows, so that CUDA graphs hold both. Sums have a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.dependent_launch import dependent_launch, wait_for_inputs
from headrace.kernels.layout import TILE_ROWS, AdapterRows, LowRankWeights

_COLUMNS = 64  # of the output, in one program
_MAX_RANKS = 64  # in one program
_TARGET_PROGRAMS = 512  # about four for each processor of a GPU; those of superfluous tiles end at once
_MAX_SPLITS = 16
_MAX_PARTIAL_SUMS = 512  # of one row, in a program that adds up the splits


def add_low_rank(out: Tensor, x: Tensor, weights: LowRankWeights, rows: AdapterRows) -> None:
    """See `ops.add_low_rank`."""
    num_adapters, max_rank, num_pieces, width = weights.down.shape
    num_rows, sizes = len(x), weights.piece_sizes
    if num_rows == 0:
        return
    assert out.stride(1) == 1 and x.stride(1) == 1 and num_pieces <= 3
    ranks = min(_MAX_RANKS, max(16, triton.next_power_of_2(max_rank)))
    num_chunks = triton.cdiv(max_rank, ranks)
    num_tiles = num_rows // TILE_ROWS + min(num_adapters, num_rows)
    depth = 64 if width % 128 else 128
    most = min(_MAX_SPLITS, _MAX_PARTIAL_SUMS // ranks, triton.cdiv(width, depth))
    splits = _num_splits(num_tiles * num_pieces * num_chunks, most)
    small = torch.empty((splits, num_rows, num_pieces, num_chunks * ranks), dtype=torch.float32, device=x.device)
    places = (rows.order, rows.starts, rows.tile_ends, weights.ranks, num_adapters)
    blocks = {"ROWS": TILE_ROWS, "RANKS": ranks, "ADAPTERS": triton.next_power_of_2(num_adapters), "SPLITS": splits}
    launch = {"num_warps": 4, **dependent_launch(x.device)}
    _shrink[(num_tiles, num_pieces * num_chunks, splits)](
        x,
        weights.down,
        small,
        *places,
        num_rows,
        x.stride(0),
        WIDTH=width,
        MAX_RANK=max_rank,
        PIECES=num_pieces,
        CHUNKS=num_chunks,
        DEPTH=depth,
        **blocks,
        **launch,
    )
    _expand[(num_tiles, triton.cdiv(max(sizes), _COLUMNS), num_pieces)](
        small,
        weights.up,
        out,
        *places,
        num_rows,
        out.stride(0),
        MAX_RANK=max_rank,
        FIRST=sizes[0],
        SECOND=sizes[1] if num_pieces > 1 else 0,
        TOTAL=sum(sizes),
        PIECES=num_pieces,
        CHUNKS=num_chunks,
        COLUMNS=_COLUMNS,
        **blocks,
        **launch,
    )


def _num_splits(num_programs: int, most: int) -> int:
    """Into how many parts the sums over the width are divided, so that a small step fills the GPU."""
    wanted = min(most, max(1, _TARGET_PROGRAMS // num_programs))
    return 1 << (wanted.bit_length() - 1)


@triton.jit
def _tile_of(tile, starts, tile_ends, num_adapters, ROWS: tl.constexpr, ADAPTERS: tl.constexpr):
    """Returns the adapter of a tile, `num_adapters` if there is no such tile; the place of its first row in the order,
    and where the adapter's rows end."""
    adapters = tl.arange(0, ADAPTERS)
    ends = tl.load(tile_ends + adapters, mask=adapters < num_adapters, other=2147483647)
    adapter = tl.sum((ends <= tile).to(tl.int32))
    first_tile = tl.max(tl.where(ends <= tile, ends, 0))
    known = tl.minimum(adapter, num_adapters - 1)
    first = tl.load(starts + known) + (tile - first_tile) * ROWS
    return adapter, first, tl.load(starts + known + 1)


@triton.jit(do_not_specialize=["num_rows", "num_adapters"])
def _shrink(
    x,
    down,
    small,
    order,
    starts,
    tile_ends,
    adapter_ranks,
    num_adapters,
    num_rows,
    x_stride,
    WIDTH: tl.constexpr,
    MAX_RANK: tl.constexpr,
    PIECES: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    ADAPTERS: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Multiplies the rows of a tile by RANKS rows of one piece of `down`, over one split of the width."""
    wait_for_inputs(IS_DEPENDENT)
    adapter, first, end = _tile_of(tl.program_id(0), starts, tile_ends, num_adapters, ROWS, ADAPTERS)
    if adapter >= num_adapters:
        return
    piece, chunk, split = tl.program_id(1) // CHUNKS, tl.program_id(1) % CHUNKS, tl.program_id(2)
    if tl.load(adapter_ranks + adapter) <= chunk * RANKS:
        return
    places = first + tl.arange(0, ROWS)
    is_row = places < end
    rows = tl.load(order + places, mask=is_row, other=0)
    ranks = chunk * RANKS + tl.arange(0, RANKS)
    depths = tl.arange(0, DEPTH)
    down_at = down + ((adapter.to(tl.int64) * MAX_RANK + ranks[:, None]) * PIECES + piece) * WIDTH + depths[None, :]
    x_at = x + rows[:, None].to(tl.int64) * x_stride + depths[None, :]
    sums = tl.zeros([ROWS, RANKS], tl.float32)
    for depth in range(split * DEPTH, WIDTH, SPLITS * DEPTH):
        inside = depth + depths[None, :] < WIDTH
        row = tl.load(x_at + depth, mask=is_row[:, None] & inside, other=0.0)
        weight = tl.load(down_at + depth, mask=(ranks[:, None] < MAX_RANK) & inside, other=0.0)
        sums = tl.dot(row, tl.trans(weight), sums, input_precision="ieee")
    at = ((split * num_rows + places[:, None]).to(tl.int64) * PIECES + piece) * (CHUNKS * RANKS) + ranks[None, :]
    tl.store(small + at, sums, mask=is_row[:, None])


@triton.jit(do_not_specialize=["num_rows", "num_adapters"])
def _expand(
    small,
    up,
    out,
    order,
    starts,
    tile_ends,
    adapter_ranks,
    num_adapters,
    num_rows,
    out_stride,
    MAX_RANK: tl.constexpr,
    FIRST: tl.constexpr,  # columns of the first piece
    SECOND: tl.constexpr,
    TOTAL: tl.constexpr,  # columns of all pieces
    PIECES: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    ADAPTERS: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Adds COLUMNS columns of one piece to the rows of a tile."""
    wait_for_inputs(IS_DEPENDENT)
    adapter, first, end = _tile_of(tl.program_id(0), starts, tile_ends, num_adapters, ROWS, ADAPTERS)
    if adapter >= num_adapters:
        return
    rank = tl.load(adapter_ranks + adapter)
    if rank == 0:
        return
    piece = tl.program_id(2)
    piece_start = tl.where(piece == 0, 0, tl.where(piece == 1, FIRST, FIRST + SECOND))
    piece_end = tl.where(piece == 0, FIRST, tl.where(piece == 1, FIRST + SECOND, TOTAL))
    columns = piece_start + tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < piece_end
    places = first + tl.arange(0, ROWS)
    is_row = places < end
    rows = tl.load(order + places, mask=is_row, other=0)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for chunk in range(CHUNKS):
        if chunk * RANKS < rank:
            ranks = chunk * RANKS + tl.arange(0, RANKS)
            lines = tl.arange(0, SPLITS)[:, None] * num_rows + places[None, :]  # [splits, rows]
            at = (lines.to(tl.int64) * PIECES + piece)[:, :, None] * (CHUNKS * RANKS) + ranks[None, None, :]
            narrow = tl.sum(tl.load(small + at, mask=is_row[None, :, None], other=0.0), axis=0)
            up_at = up + (adapter.to(tl.int64) * TOTAL + columns[:, None]) * MAX_RANK + ranks[None, :]
            weight = tl.load(up_at, mask=is_column[:, None] & (ranks[None, :] < MAX_RANK), other=0.0)
            sums = tl.dot(narrow.to(weight.dtype), tl.trans(weight), sums, input_precision="ieee")
    at = out + rows[:, None].to(tl.int64) * out_stride + columns[None, :]
    is_inside = is_row[:, None] & is_column[None, :]
    before = tl.load(at, mask=is_inside, other=0.0)
    tl.store(at, (before.to(tl.float32) + sums).to(out.dtype.element_ty), mask=is_inside)
