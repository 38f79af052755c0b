"""Grouped GEMM of a mixture of experts: multiplies each route's row by the matrix of its expert, all experts in one
launch.

    few_experts.py      up to 4 tokens
    sorted_experts.py   up to 16 tokens
    expert_columns.py   more, but few routes per expert
    experts_int4.py     any number, with weights of four bits
    here                any other

One program computes a tile of rows of one expert times a tile of its columns. The grid is as large as the routes could
ever need; programs find their expert from the counts on the device. So the host waits for nothing, and a CUDA graph can
hold the launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu import expert_columns, few_experts, sorted_experts
from headrace.kernels.gpu.activation import ACTIVATIONS, gate
from headrace.kernels.gpu.dependent_launch import dependent_launch, wait_for_inputs
from headrace.kernels.gpu.experts_int4 import Int4Experts
from headrace.kernels.gpu.fp8 import quantize_rows
from headrace.kernels.gpu.int4_values import can_pack
from headrace.kernels.gpu.scaled_gemm import quantize_groups_fp8
from headrace.kernels.gpu.shared_memory import shared_memory_bytes
from headrace.kernels.layout import Fp8Rows, Routes, Rows, UnnormedRows
from headrace.kernels.quantized import BLOCK_LEN, Fp8Weight, Int4Weight

_TILES_TOGETHER = 8  # row tiles whose programs run side by side and share weight tiles in the L2 cache


class PackedExperts:
    """The weight matrices of all experts, in the type of the activations or in FP8, with a scale per row (`fp8.py`) or
    per block of 128 x 128 weights (`scaled_gemm.py`)."""

    def __init__(self, weight: Tensor | Fp8Rows | Fp8Weight, num_experts: int, dtype: torch.dtype) -> None:
        """`weight`: [E, N, K], in FP8 [E * N, K]. `dtype`: of the activations."""
        values = weight if isinstance(weight, Tensor) else weight.values
        self._shape = num_experts, values.shape[-2] // (num_experts if values.dim() == 2 else 1), values.shape[-1]
        self._dtype = dtype
        self._weight = weight
        self.takes_fp8 = isinstance(weight, Fp8Rows)

    @property
    def plain(self) -> Tensor | None:  # [E, N, K]
        """The matrices, if they are not quantized."""
        return self._weight if isinstance(self._weight, Tensor) else None

    def gated(self, x: Tensor, routes: Routes, activation: str) -> Tensor:  # [T, K] -> [R, N / 2]
        """Multiplies by gate and up, the halves of each matrix, and applies the activation. Not for FP8 with scales per
        row, which the sums get at the end."""
        assert not self.takes_fp8
        return self._multiply(x, routes, weighs=False, activation=activation)

    def __call__(self, x: Rows, routes: Routes, *, weighs: bool = False) -> Tensor:  # [T or R, K] -> [R, N]
        return self._multiply(x, routes, weighs=weighs, activation=None)

    def _multiply(self, x: Rows, routes: Routes, *, weighs: bool, activation: str | None) -> Tensor:
        assert not isinstance(x, UnnormedRows)
        plain = self.plain
        if plain is not None and isinstance(x, Tensor) and sorted_experts.takes(plain, x, routes, activation):
            return sorted_experts.multiply(x, plain, routes, weighs=weighs, activation=activation)
        weight, block_len = self._weight, 0
        if isinstance(weight, Fp8Weight):
            assert isinstance(x, Tensor)
            x, block_len = Fp8Rows(*quantize_groups_fp8(x)), BLOCK_LEN
        elif self.takes_fp8 and isinstance(x, Tensor):
            x = quantize_rows(x)
        values, scales = (x.values, x.scales) if isinstance(x, Fp8Rows) else (x, x)
        matrices, matrix_scales = (weight, weight) if isinstance(weight, Tensor) else (weight.values, weight.scales)
        num_experts, num_columns, width = self._shape
        num_columns //= 1 if activation is None else 2
        num_routes = routes.order.shape[0]
        out = torch.empty((num_routes, num_columns), dtype=self._dtype, device=values.device)
        if num_routes == 0:
            return out
        if expert_columns.takes(num_columns, width, num_routes / num_experts, block_len):
            expert_columns.multiply(
                values,
                scales,
                matrices,
                matrix_scales,
                routes,
                out,
                block_len=block_len,
                weighs=weighs,
                activation=activation,
            )
            return out
        tile = _tile_shape(
            num_routes / num_experts,
            element_bytes=values.element_size(),
            block_len=block_len,
            is_gated=activation is not None,
            max_bytes=shared_memory_bytes(values.device),
        )
        rows, columns, depth, num_warps, num_stages = tile
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
            HAS_ROW_SCALES=self.takes_fp8,
            BLOCK_LEN=block_len,
            WEIGHS=weighs,
            ACTIVATION=ACTIVATIONS[activation],
            num_warps=num_warps,
            num_stages=num_stages,
            **dependent_launch(values.device),
        )
        return out


def pack_experts(weight: Tensor, *, as_fp8: bool = False) -> PackedExperts:  # [E, N, K]
    num_experts = weight.shape[0]
    packed = quantize_rows(weight.flatten(0, 1)) if as_fp8 else weight.contiguous()
    return PackedExperts(packed, num_experts, weight.dtype)


def pack_quantized_experts(
    weight: Fp8Weight | Int4Weight, num_experts: int, dtype: torch.dtype
) -> PackedExperts | Int4Experts | None:  # [E * N, K]
    """See `ops.pack_quantized_experts`."""
    if isinstance(weight, Int4Weight):
        return Int4Experts(weight, num_experts, dtype) if can_pack(weight) else None
    packed = weight if weight.has_blocks else Fp8Rows(weight.values, weight.scales)
    return PackedExperts(packed, num_experts, dtype)


def takes_few_tokens(up: PackedExperts, down: PackedExperts, x: Tensor, activation: str) -> bool:
    """See `ops.takes_few_tokens`."""
    if up.plain is None or down.plain is None:
        return False
    return few_experts.takes(up.plain, down.plain, x.shape[0], activation)


def experts_of_few_tokens(
    up: PackedExperts, down: PackedExperts, x: Tensor, routes: Routes, activation: str
) -> Tensor:  # [T, H] -> [T, H]
    """See `ops.experts_of_few_tokens`."""
    assert up.plain is not None and down.plain is not None
    return few_experts.compute(up.plain, down.plain, x, routes, activation)


def gated_experts(up: PackedExperts, x: Tensor, routes: Routes, activation: str) -> Tensor:  # [T, K] -> [R, N / 2]
    """See `ops.gated_experts`."""
    return up.gated(x, routes, activation)


# Routes per expert up to which a tile is used; its rows, columns, bytes of its depth, warps and stages. The best of
# sweeps on an H200, 2026-11-17, in bfloat16, with 128 experts of width 2048 and 768 and 1 to 8,192 tokens. The small
# ones are for widths that `expert_columns.py` does not take, such as the 96 columns of 768 that one of eight ranks has.
_TILES = (
    (8, (16, 128, 256, 8, 4)),
    (24, (32, 128, 256, 4, 3)),
    (400, (128, 256, 128, 8, 4)),
    (None, (128, 256, 128, 8, 3)),
)


def _tile_shape(
    routes_per_expert: float, *, element_bytes: int, block_len: int, is_gated: bool, max_bytes: int
) -> tuple[int, int, int, int, int]:
    """Returns rows, columns and depth of a tile, warps and stages: fewer stages where shared memory is small. Gate and
    up have half of the columns each. With scales per block a tile is as deep as a block, and has two sums per column
    in registers."""
    tile = next(tile for most, tile in _TILES if most is None or routes_per_expert <= most)
    rows, columns, depth_bytes, num_warps, num_stages = tile
    depth = depth_bytes // element_bytes
    if block_len:
        columns, depth = min(columns, 128), block_len
    num_stages = max(1, min(num_stages, max_bytes // ((rows + columns) * depth * element_bytes)))
    return rows, columns // 2 if is_gated else columns, depth, num_warps, num_stages


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
    HAS_ROW_SCALES: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    WEIGHS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Finds the expert, rows and columns of a program's tile."""
    wait_for_inputs(IS_DEPENDENT)
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

    # The last tile of an expert is computed with no more rows than it needs.
    if ROWS == 128 and stop - start <= 32:
        _multiply_tile(
            x, x_scales, weight, weight_scales, order, route_weights, out, routes_per_row, expert, column_tile, start,
            stop, NUM_COLUMNS, WIDTH, 32, COLUMNS, DEPTH, HAS_ROW_SCALES, BLOCK_LEN, WEIGHS, ACTIVATION,
        )  # fmt: skip
    elif ROWS == 128 and stop - start <= 64:
        _multiply_tile(
            x, x_scales, weight, weight_scales, order, route_weights, out, routes_per_row, expert, column_tile, start,
            stop, NUM_COLUMNS, WIDTH, 64, COLUMNS, DEPTH, HAS_ROW_SCALES, BLOCK_LEN, WEIGHS, ACTIVATION,
        )  # fmt: skip
    else:
        _multiply_tile(
            x, x_scales, weight, weight_scales, order, route_weights, out, routes_per_row, expert, column_tile, start,
            stop, NUM_COLUMNS, WIDTH, ROWS, COLUMNS, DEPTH, HAS_ROW_SCALES, BLOCK_LEN, WEIGHS, ACTIVATION,
        )  # fmt: skip


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
    HAS_ROW_SCALES: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    WEIGHS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Multiplies up to ROWS routes of one expert by a tile of its columns. With an activation, the matrix is the gate
    above up: NUM_COLUMNS rows each."""
    lines = start + tl.arange(0, ROWS)
    routes = tl.load(order + lines, mask=lines < stop, other=0).to(tl.int64)
    tokens = routes // routes_per_row
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns % NUM_COLUMNS  # columns past the last wrap around; their results are not stored
    depths = tl.arange(0, DEPTH)
    row_at = x + tokens[:, None] * WIDTH + depths[None, :]
    matrix_rows: tl.constexpr = 2 * NUM_COLUMNS if ACTIVATION else NUM_COLUMNS
    matrix_columns = expert.to(tl.int64) * matrix_rows + inside
    matrix_at = weight + matrix_columns[:, None] * WIDTH + depths[None, :]
    up_at = matrix_at + NUM_COLUMNS * WIDTH
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up_total = tl.zeros([ROWS, COLUMNS], tl.float32)
    num_blocks: tl.constexpr = (WIDTH + DEPTH - 1) // DEPTH  # with scales per block
    for depth in tl.range(0, WIDTH, DEPTH):
        if WIDTH % DEPTH == 0:
            row = tl.load(row_at + depth)
            matrix = tl.load(matrix_at + depth)
        else:
            row = tl.load(row_at + depth, mask=depth + depths[None, :] < WIDTH, other=0.0)
            matrix = tl.load(matrix_at + depth, mask=depth + depths[None, :] < WIDTH, other=0.0)
        if BLOCK_LEN:
            row_scale = tl.load(x_scales + tokens * num_blocks + depth // DEPTH)[:, None]
            scale_at = weight_scales + matrix_columns // BLOCK_LEN * num_blocks + depth // DEPTH
            total += tl.dot(row, tl.trans(matrix)) * row_scale * tl.load(scale_at)[None, :]
        else:
            total = tl.dot(row, tl.trans(matrix), total)
        if ACTIVATION:
            if WIDTH % DEPTH == 0:
                up_matrix = tl.load(up_at + depth)
            else:
                up_matrix = tl.load(up_at + depth, mask=depth + depths[None, :] < WIDTH, other=0.0)
            if BLOCK_LEN:
                up_scale = tl.load(scale_at + NUM_COLUMNS // BLOCK_LEN * num_blocks)[None, :]
                up_total += tl.dot(row, tl.trans(up_matrix)) * row_scale * up_scale
            else:
                up_total = tl.dot(row, tl.trans(up_matrix), up_total)
    if ACTIVATION:
        total = gate(total, up_total, out, ACTIVATION).to(tl.float32)
    if HAS_ROW_SCALES:
        total = total * tl.load(x_scales + tokens)[:, None]
        total = total * tl.load(weight_scales + matrix_columns)[None, :]
    if WEIGHS:
        total = total * tl.load(route_weights + routes)[:, None]
    at = out + routes[:, None] * NUM_COLUMNS + columns[None, :]
    is_inside = (lines[:, None] < stop) & (columns[None, :] < NUM_COLUMNS)
    tl.store(at, total.to(out.dtype.element_ty), mask=is_inside)
