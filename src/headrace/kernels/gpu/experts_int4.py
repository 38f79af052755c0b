"""Experts with weights of four bits: tiles as in `expert_columns.py`, of weights that are widened as in `int4.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.activation import ACTIVATIONS, gate
from headrace.kernels.gpu.dependent_launch import dependent_launch, wait_for_inputs
from headrace.kernels.gpu.expert_columns import find_tile
from headrace.kernels.gpu.int4_values import PACK_LEN, pack, scale_of, weights_of, zero_points
from headrace.kernels.layout import Fp8Rows, Routes, Rows, UnnormedRows
from headrace.kernels.quantized import Int4Weight


class Int4Experts:
    """The weight matrices of all experts."""

    takes_fp8 = False
    plain = None  # they are quantized

    def __init__(self, weight: Int4Weight, num_experts: int, dtype: torch.dtype) -> None:  # [E * N, K]
        num_rows, width = weight.values.shape
        self._shape = num_experts, num_rows // num_experts, width
        self._matrix = pack(weight)
        self._order, self._dtype = weight.order, dtype

    def gated(self, x: Tensor, routes: Routes, activation: str) -> Tensor:  # [T, K] -> [R, N / 2]
        """Multiplies by gate and up, the halves of each matrix, and applies the activation."""
        return self._multiply(x, routes, weighs=False, activation=activation)

    def __call__(self, x: Rows, routes: Routes, *, weighs: bool = False) -> Tensor:  # [T or R, K] -> [R, N]
        assert not isinstance(x, (Fp8Rows, UnnormedRows))
        return self._multiply(x, routes, weighs=weighs, activation=None)

    def _multiply(self, x: Tensor, routes: Routes, *, weighs: bool, activation: str | None) -> Tensor:
        num_experts, num_columns, width = self._shape
        num_columns //= 1 if activation is None else 2
        num_routes = routes.order.shape[0]
        out = torch.empty((num_routes, num_columns), dtype=self._dtype, device=x.device)
        if num_routes == 0:
            return out
        x = x.contiguous() if self._order is None else x.index_select(1, self._order)
        rows, columns, num_warps, num_stages = _tile_shape(num_routes / num_experts, is_gated=activation is not None)
        num_tiles = num_experts + (num_routes - 1) // rows  # at most: an expert's first one counts for all its routes
        _multiply_int4_experts[(num_tiles * triton.cdiv(num_columns, columns),)](
            x,
            self._matrix.packed,
            self._matrix.scales,
            routes.order,
            routes.ends,
            routes.weights,
            out,
            num_routes // x.shape[0],
            NUM_EXPERTS=num_experts,
            EXPERTS_BLOCK=triton.next_power_of_2(num_experts),
            NUM_COLUMNS=num_columns,
            WIDTH=width,
            ROWS=rows,
            COLUMNS=columns,
            PACK_LEN=PACK_LEN,
            GROUPS=self._matrix.groups,
            HAS_ZEROS=self._matrix.has_zeros,
            WEIGHS=weighs,
            ACTIVATION=ACTIVATIONS[activation],
            num_warps=num_warps,
            num_stages=num_stages,
            IS_INTERPRETED=triton.knobs.runtime.interpret,
            **dependent_launch(x.device),
        )
        return out


def _tile_shape(routes_per_expert: float, *, is_gated: bool) -> tuple[int, int, int, int]:
    """Returns rows and columns of a tile, warps and stages: those of `int4.py`, not swept on a GPU. Gate and up have
    so many columns each."""
    if routes_per_expert <= 16:
        return 16, 64, 4, 3
    if routes_per_expert <= 32:
        return 32, 64, 4, 3
    return 64, 64 if is_gated else 128, 8, 3


@triton.jit(do_not_specialize=["routes_per_row"])
def _multiply_int4_experts(
    x,
    packed,
    scales,
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
    COLUMNS: tl.constexpr,
    PACK_LEN: tl.constexpr,
    GROUPS: tl.constexpr,  # of PACK_LEN weights: 1, 2 or 4
    HAS_ZEROS: tl.constexpr,
    WEIGHS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Computes a tile transposed, [COLUMNS, ROWS]: the weights are the left operand. With an activation, the matrix is
    the gate above up: NUM_COLUMNS rows each."""
    wait_for_inputs(IS_DEPENDENT)
    num_column_tiles: tl.constexpr = (NUM_COLUMNS + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // num_column_tiles
    expert, start, stop = find_tile(tile, ends, NUM_EXPERTS, EXPERTS_BLOCK, ROWS)
    if start >= stop:
        return
    lines = start + tl.arange(0, ROWS)
    is_ours = lines < stop
    routes = tl.load(order + lines, mask=is_ours, other=0).to(tl.int64)
    columns = tl.program_id(0) % num_column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < NUM_COLUMNS
    matrix_rows: tl.constexpr = 2 * NUM_COLUMNS if ACTIVATION else NUM_COLUMNS
    all_rows: tl.constexpr = NUM_EXPERTS * matrix_rows
    matrix_columns = expert.to(tl.int64) * matrix_rows + columns
    DEPTH: tl.constexpr = PACK_LEN // GROUPS
    depths = tl.arange(0, DEPTH)
    x_at = x + routes[None, :] // routes_per_row * WIDTH + depths[:, None]
    words_at = packed + matrix_columns[:, None] * 16 + tl.arange(0, 16)[None, :]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    up_total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for block in tl.range(0, (WIDTH + PACK_LEN - 1) // PACK_LEN):
        block_at = words_at + tl.cast(block, tl.int64) * (all_rows * 16)
        words = tl.load(block_at, mask=inside[:, None], other=0)
        if ACTIVATION:
            up_words = tl.load(block_at + NUM_COLUMNS * 16, mask=inside[:, None], other=0)
        for part in tl.static_range(GROUPS):
            depth = block * PACK_LEN + part * DEPTH
            is_input = is_ours[None, :]
            if WIDTH % PACK_LEN:
                is_input = is_input & (depth + depths[:, None] < WIDTH)
            row = tl.load(x_at + depth, mask=is_input, other=0.0)
            scale_at = scales + tl.cast(block * GROUPS + part, tl.int64) * all_rows + matrix_columns
            total += _product(
                words, tl.load(scale_at, mask=inside, other=0.0), row, x, part, GROUPS, HAS_ZEROS, IS_INTERPRETED
            )
            if ACTIVATION:
                up_scale = tl.load(scale_at + NUM_COLUMNS, mask=inside, other=0.0)
                up_total += _product(up_words, up_scale, row, x, part, GROUPS, HAS_ZEROS, IS_INTERPRETED)
    if ACTIVATION:
        total = gate(total, up_total, out, ACTIVATION).to(tl.float32)
    if WEIGHS:
        total = total * tl.load(route_weights + routes, mask=is_ours, other=0.0)[None, :]
    at = out + routes[None, :] * NUM_COLUMNS + columns[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=is_ours[None, :] & inside[:, None])


@triton.jit
def _product(
    words,  # [COLUMNS, 16]
    scale,  # [COLUMNS]
    row,  # [DEPTH, ROWS]
    like,
    PART: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Multiplies the weights of one group of each word by the inputs of that group."""
    zero = zero_points(scale, like, HAS_ZEROS, IS_INTERPRETED)
    if HAS_ZEROS:
        scale = scale_of(scale)
    weight = weights_of(words, zero, PART * (4 // GROUPS), 4 // GROUPS, like, IS_INTERPRETED)
    return tl.dot(weight, row) * scale[:, None]
