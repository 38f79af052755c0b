"""Grouped GEMM of a mixture of experts: multiplies each route's row by the matrix of its expert, all experts in one
launch.

One program computes a tile of rows of one expert times a tile of its columns. The grid is as large as the routes could
ever need; programs find their expert from the counts on the device. So the host waits for nothing, and a CUDA graph can
hold the launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.fp8 import quantize_rows
from headrace.kernels.layout import Fp8Rows, Routes, Rows

_TILES_TOGETHER = 8  # row tiles whose programs run side by side and share weight tiles in the L2 cache


class PackedExperts:
    """The weight matrices of all experts, in the type of the activations or in FP8 (see `fp8.py`)."""

    def __init__(self, weight: Tensor, *, as_fp8: bool = False) -> None:  # [E, N, K]
        self._shape = weight.shape
        self._dtype = weight.dtype
        self._weight = quantize_rows(weight.flatten(0, 1)) if as_fp8 else weight.contiguous()
        self.takes_fp8 = as_fp8

    def __call__(self, x: Rows, routes: Routes, *, weighs: bool = False) -> Tensor:  # [T or R, K] -> [R, N]
        if self.takes_fp8 and isinstance(x, Tensor):
            x = quantize_rows(x)
        values, scales = (x.values, x.scales) if isinstance(x, Fp8Rows) else (x, x)
        weight = self._weight
        matrices, matrix_scales = (weight.values, weight.scales) if isinstance(weight, Fp8Rows) else (weight, weight)
        num_experts, num_columns, width = self._shape
        num_routes = routes.order.shape[0]
        out = torch.empty((num_routes, num_columns), dtype=self._dtype, device=values.device)
        if num_routes == 0:
            return out
        rows, columns, depth, num_warps, num_stages = _tile_shape(num_routes / num_experts, is_fp8=self.takes_fp8)
        # At most one tile per route, and at most one partly filled tile per expert.
        num_tiles = min(num_routes, triton.cdiv(num_routes, rows) + num_experts - 1)
        _multiply[(num_tiles * triton.cdiv(num_columns, columns),)](
            values.contiguous(),
            scales,
            matrices,
            matrix_scales,
            routes.order,
            routes.ends,
            routes.weights,
            out,
            num_tiles,
            num_routes // values.shape[0],
            NUM_EXPERTS=num_experts,
            EXPERTS_BLOCK=triton.next_power_of_2(num_experts),
            NUM_COLUMNS=num_columns,
            WIDTH=width,
            ROWS=rows,
            COLUMNS=columns,
            DEPTH=depth,
            TOGETHER=_TILES_TOGETHER,
            IS_FP8=self.takes_fp8,
            WEIGHS=weighs,
            num_warps=num_warps,
            num_stages=num_stages,
        )
        return out


def pack_experts(weight: Tensor, *, as_fp8: bool = False) -> PackedExperts:  # [E, N, K]
    return PackedExperts(weight, as_fp8=as_fp8)


def _tile_shape(rows_of_expert: float, *, is_fp8: bool) -> tuple[int, int, int, int, int]:
    """Returns rows, columns and depth of a tile, warps and stages. Not swept on a GPU yet."""
    depth = 128 if is_fp8 else 64
    for rows in (16, 32, 64):
        if rows_of_expert <= rows:
            return rows, 128, depth, 4, 4
    return 128, 128, depth, 8, 3


@triton.jit(do_not_specialize=["num_tiles", "routes_per_row"])
def _multiply(
    x,
    x_scales,
    weight,
    weight_scales,
    order,
    ends,
    route_weights,
    out,
    num_tiles,
    routes_per_row,  # routes that share a row of x
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    IS_FP8: tl.constexpr,
    WEIGHS: tl.constexpr,
):
    together = TOGETHER * tl.cdiv(NUM_COLUMNS, COLUMNS)
    first_tile = tl.program_id(0) // together * TOGETHER
    num_together = tl.minimum(num_tiles - first_tile, TOGETHER)
    tile = first_tile + tl.program_id(0) % together % num_together
    column_tile = tl.program_id(0) % together // num_together

    experts = tl.arange(0, EXPERTS_BLOCK)
    is_expert = experts < NUM_EXPERTS
    stops = tl.load(ends + experts, mask=is_expert, other=0)
    starts = tl.load(ends + experts - 1, mask=is_expert & (experts > 0), other=0)
    tiles = tl.cdiv(stops - starts, ROWS)  # per expert
    last_tiles = tl.cumsum(tl.where(is_expert, tiles, 0), axis=0)
    expert = tl.sum((last_tiles <= tile).to(tl.int32), axis=0)
    if expert >= NUM_EXPERTS:  # the grid is larger than needed
        return
    is_ours = experts == expert
    start = tl.sum(tl.where(is_ours, starts + (tile - last_tiles + tiles) * ROWS, 0), axis=0)
    stop = tl.sum(tl.where(is_ours, stops, 0), axis=0)

    lines = start + tl.arange(0, ROWS)
    routes = tl.load(order + lines, mask=lines < stop, other=0).to(tl.int64)
    tokens = routes // routes_per_row
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns % NUM_COLUMNS  # columns past the last wrap around; their results are not stored
    depths = tl.arange(0, DEPTH)
    row_at = x + tokens[:, None] * WIDTH + depths[None, :]
    matrix_at = weight + (expert.to(tl.int64) * NUM_COLUMNS + inside)[:, None] * WIDTH + depths[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for depth in tl.range(0, WIDTH, DEPTH):
        if WIDTH % DEPTH == 0:
            row = tl.load(row_at + depth)
            matrix = tl.load(matrix_at + depth)
        else:
            row = tl.load(row_at + depth, mask=depth + depths[None, :] < WIDTH, other=0.0)
            matrix = tl.load(matrix_at + depth, mask=depth + depths[None, :] < WIDTH, other=0.0)
        total = tl.dot(row, tl.trans(matrix), total)
    if IS_FP8:
        total = total * tl.load(x_scales + tokens)[:, None]
        total = total * tl.load(weight_scales + expert.to(tl.int64) * NUM_COLUMNS + inside)[None, :]
    if WEIGHS:
        total = total * tl.load(route_weights + routes)[:, None]
    at = out + routes[:, None] * NUM_COLUMNS + columns[None, :]
    is_inside = (lines[:, None] < stop) & (columns[None, :] < NUM_COLUMNS)
    tl.store(at, total.to(out.dtype.element_ty), mask=is_inside)
