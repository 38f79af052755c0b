"""Experts with few routes each: one program per expert and tile of its columns, so that each weight is read once.

Reading the weights is what takes time, so the weight is the left operand: tensor cores take 64 rows of it, and as few
as 8 columns on the right, the rows of the routes. A program's expert is its number; only an expert with more routes
than a tile has rows gets more programs, at the end of the grid, which search for it.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.activation import ACTIVATIONS, gate
from headrace.kernels.gpu.dependent_launch import dependent_launch, wait_for_inputs
from headrace.kernels.gpu.one_row import tile_depth
from headrace.kernels.gpu.shared_memory import fitting_stages
from headrace.kernels.layout import Routes

MIN_COLUMNS = 64  # tensor cores take 64 rows of a weight
MIN_DEPTH = 64
_MAX_ROUTES = 40  # per expert; with more, the tiles of experts.py are faster


class ColumnTile(NamedTuple):
    rows: int  # most routes of a tile
    min_rows: int  # of a smaller one, for experts with fewer routes
    columns: int
    depth_bytes: int
    stages: int
    num_warps: int


# Routes per expert up to which a tile is used. The best of sweeps on an H200 in bfloat16, with 128 experts of width
# 2,048 and 768 and 64 to 1,000 tokens.
_GATED_TILES = ((22, ColumnTile(32, 16, 128, 256, 3, 8)), (_MAX_ROUTES, ColumnTile(64, 32, 128, 128, 5, 8)))
_TILES = ((22, ColumnTile(32, 16, 256, 128, 3, 4)), (_MAX_ROUTES, ColumnTile(64, 32, 256, 128, 5, 8)))


def takes(num_columns: int, width: int, routes_per_expert: float, block_len: int = 0) -> bool:
    """Whether `multiply` is the fastest kernel for these routes, and its tiles fit the matrices. `block_len`: of FP8
    weights with scales per block."""
    fits = num_columns % MIN_COLUMNS == 0 and width % max(MIN_DEPTH, block_len) == 0
    return routes_per_expert <= _MAX_ROUTES and fits


def multiply(
    values: Tensor,  # [T or R, K]
    scales: Tensor,  # in FP8 one per row, or per `block_len` columns of a row
    matrices: Tensor,  # [E * N, K], or with an activation [E * 2 * N, K]
    matrix_scales: Tensor,  # in FP8 one per row, or per block
    routes: Routes,
    out: Tensor,  # [R, N]
    *,
    block_len: int,  # 0: scales are of rows, if there are any
    weighs: bool,
    activation: str | None,
) -> None:
    """Multiplies each route's row by the matrix of its expert. See `experts.py`."""
    (num_routes, num_columns), width, num_experts = out.shape, values.shape[1], routes.ends.shape[0]
    num_matrices = 1 if activation is None else 2
    tiles = _TILES if activation is None else _GATED_TILES
    tile = next(tile for most, tile in tiles if num_routes <= most * num_experts)
    columns = _largest_divisor(num_columns, tile.columns)
    depth = block_len or tile_depth(width, tile.depth_bytes // values.element_size())
    stage_bytes = (num_matrices * columns + tile.rows) * depth * values.element_size()
    num_tiles = num_experts + (num_routes - 1) // tile.rows  # at most: an expert's first one counts for all its routes
    _multiply_columns[(num_tiles * (num_columns // columns),)](
        values.contiguous(),
        scales,
        matrices,
        matrix_scales,
        routes.order,
        routes.ends,
        routes.weights,
        out,
        num_routes // values.shape[0],
        NUM_EXPERTS=num_experts,
        EXPERTS_BLOCK=triton.next_power_of_2(num_experts),
        NUM_COLUMNS=num_columns,
        WIDTH=width,
        ROWS=tile.rows,
        MIN_ROWS=tile.min_rows,
        COLUMNS=columns,
        DEPTH=depth,
        STAGES=fitting_stages(tile.stages, stage_bytes, values.device),
        HAS_ROW_SCALES=not block_len and scales is not values,
        BLOCK_LEN=block_len,
        WEIGHS=weighs,
        ACTIVATION=ACTIVATIONS[activation],
        num_warps=tile.num_warps,
        **dependent_launch(values.device),
    )


def _largest_divisor(num_columns: int, largest: int) -> int:
    while num_columns % largest:
        largest //= 2
    return largest


@triton.jit(do_not_specialize=["routes_per_row"])
def _multiply_columns(
    x,
    x_scales,
    weight,
    weight_scales,
    order,
    ends,
    route_weights,
    out,
    routes_per_row,  # routes that share a row of x
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    MIN_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    WEIGHS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Finds the expert and the routes of a program."""
    wait_for_inputs(IS_DEPENDENT)
    column_tile = tl.program_id(0) % (NUM_COLUMNS // COLUMNS)
    expert, start, stop = find_tile(
        tl.program_id(0) // (NUM_COLUMNS // COLUMNS), ends, NUM_EXPERTS, EXPERTS_BLOCK, ROWS
    )
    if start >= stop:
        return
    if stop - start <= MIN_ROWS:
        _multiply_tile(
            x, x_scales, weight, weight_scales, order, route_weights, out, routes_per_row, expert, column_tile, start,
            stop, NUM_COLUMNS, WIDTH, MIN_ROWS, COLUMNS, DEPTH, STAGES, HAS_ROW_SCALES, BLOCK_LEN, WEIGHS, ACTIVATION,
        )  # fmt: skip
    else:
        _multiply_tile(
            x, x_scales, weight, weight_scales, order, route_weights, out, routes_per_row, expert, column_tile, start,
            stop, NUM_COLUMNS, WIDTH, ROWS, COLUMNS, DEPTH, STAGES, HAS_ROW_SCALES, BLOCK_LEN, WEIGHS, ACTIVATION,
        )  # fmt: skip


@triton.jit
def find_tile(tile, ends, NUM_EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Returns the expert of a tile, its first route and where the expert's routes end; none are left if these are
    equal."""
    if tile < NUM_EXPERTS:
        expert = tile
        start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        stop = tl.load(ends + expert)
    else:
        experts = tl.arange(0, EXPERTS_BLOCK)
        is_expert = experts < NUM_EXPERTS
        stops = tl.load(ends + experts, mask=is_expert, other=0)
        starts = tl.load(ends + experts - 1, mask=is_expert & (experts > 0), other=0)
        more_tiles = tl.where(is_expert, tl.maximum(tl.cdiv(stops - starts, ROWS) - 1, 0), 0)  # per expert
        last_tiles = NUM_EXPERTS + tl.cumsum(more_tiles, axis=0)
        expert = tl.sum((last_tiles <= tile).to(tl.int32), axis=0)
        is_ours = experts == expert
        start = tl.sum(tl.where(is_ours, starts + (tile - last_tiles + more_tiles + 1) * ROWS, 0), axis=0)
        stop = tl.sum(tl.where(is_ours, stops, 0), axis=0)
    return expert, start, stop


@triton.jit
def _multiply_tile(
    x,
    x_scales,
    weight,
    weight_scales,
    order,
    route_weights,
    out,
    routes_per_row,
    expert,
    column_tile,
    start,  # the tile's first route, in their order
    stop,  # where the expert's routes end
    NUM_COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    WEIGHS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    lines = start + tl.arange(0, ROWS)
    routes = tl.load(order + lines, mask=lines < stop, other=0)
    sums = multiply_by_columns(
        x, x_scales, weight, weight_scales, routes // routes_per_row, lines < stop, expert, column_tile, out,
        NUM_COLUMNS, WIDTH, ROWS, COLUMNS, DEPTH, STAGES, HAS_ROW_SCALES, BLOCK_LEN, ACTIVATION,
    )  # fmt: skip
    store_columns(sums, route_weights, out, routes, lines < stop, column_tile, NUM_COLUMNS, COLUMNS, WEIGHS)


@triton.jit
def multiply_by_columns(
    x,
    x_scales,
    weight,
    weight_scales,
    rows,  # [ROWS] of x
    is_ours,  # [ROWS], whether it is a row of this expert
    expert,
    column_tile,
    like,  # a pointer to the type of the gate's inputs, which are not in FP8
    NUM_COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Returns a tile of columns of an expert's matrix times these rows, [COLUMNS, ROWS]. With an activation, the
    matrix is the gate above up: NUM_COLUMNS rows each."""
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    matrix_rows: tl.constexpr = 2 * NUM_COLUMNS if ACTIVATION else NUM_COLUMNS
    matrix_columns = expert.to(tl.int64) * matrix_rows + columns
    matrix_at = weight + matrix_columns[:, None] * WIDTH
    up_at = matrix_at + NUM_COLUMNS * WIDTH
    row_at = x + rows.to(tl.int64)[:, None] * WIDTH
    depths = tl.arange(0, DEPTH)[None, :]
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    up_sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    num_blocks: tl.constexpr = WIDTH // DEPTH  # with scales per block
    for depth in tl.range(0, WIDTH, DEPTH, num_stages=STAGES):
        row = tl.trans(tl.load(row_at + depth + depths, mask=is_ours[:, None], other=0.0))
        if BLOCK_LEN:
            row_scale = tl.load(x_scales + rows * num_blocks + depth // DEPTH, mask=is_ours, other=0.0)[None, :]
            scale_at = weight_scales + matrix_columns // BLOCK_LEN * num_blocks + depth // DEPTH
            product = tl.dot(tl.load(matrix_at + depth + depths), row, input_precision="ieee")
            sums += product * tl.load(scale_at)[:, None] * row_scale
        else:
            sums = tl.dot(tl.load(matrix_at + depth + depths), row, sums, input_precision="ieee")
        if ACTIVATION:
            if BLOCK_LEN:
                up_scale = tl.load(scale_at + NUM_COLUMNS // BLOCK_LEN * num_blocks)[:, None]
                up_product = tl.dot(tl.load(up_at + depth + depths), row, input_precision="ieee")
                up_sums += up_product * up_scale * row_scale
            else:
                up_sums = tl.dot(tl.load(up_at + depth + depths), row, up_sums, input_precision="ieee")
    if HAS_ROW_SCALES:
        sums = sums * tl.load(x_scales + rows, mask=is_ours, other=0.0)[None, :]
        sums = sums * tl.load(weight_scales + matrix_columns)[:, None]
    if ACTIVATION:
        sums = gate(sums, up_sums, like, ACTIVATION).to(tl.float32)
    return sums


@triton.jit
def store_columns(
    sums,
    route_weights,
    out,
    routes,
    is_ours,
    column_tile,
    NUM_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WEIGHS: tl.constexpr,
):
    """Writes the columns of these routes, times the routes' weights if it WEIGHS."""
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    if WEIGHS:
        sums = sums * tl.load(route_weights + routes, mask=is_ours, other=0.0)[None, :]
    at = out + routes.to(tl.int64)[None, :] * NUM_COLUMNS + columns[:, None]
    tl.store(at, sums.to(out.dtype.element_ty), mask=is_ours[None, :])
