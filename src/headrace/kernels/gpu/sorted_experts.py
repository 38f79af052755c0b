"""Experts of a step with 2 to 16 tokens and several experts each: as `expert_columns.py`, with one program per expert
that has routes, and tile of its columns. All routes of an expert are one tile of 16 rows.

    gate and up    waits for the routes before it lets the next kernel start
    down           so it finds its expert while gate and up still run

A program finds its expert by one round of loads: the experts of the routes stand in their order (`few_routes.py`), and
the first route of an expert has the program. Programs are short, so what they do before their first load counts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.activation import ACTIVATIONS
from headrace.kernels.gpu.dependent_launch import dependent_launch, let_next_start, wait_for_kernels_before
from headrace.kernels.gpu.expert_columns import MIN_COLUMNS, MIN_DEPTH, multiply_by_columns, store_columns
from headrace.kernels.gpu.one_row import tile_depth
from headrace.kernels.gpu.shared_memory import fitting_stages
from headrace.kernels.layout import Routes

_ROWS = 16  # the smallest side of a tensor core product


class ExpertTile(NamedTuple):
    columns: int
    depth: int
    stages: int
    num_warps: int


def takes(weight: Tensor, x: Tensor, routes: Routes, activation: str | None) -> bool:  # [E, N, K]
    """Whether `multiply` computes these routes: few, in order with their experts, and whole tiles. Where it takes the
    down product it takes gate and up too (64 divides the width of one if it divides the columns of the other), so that
    the kernel before down is one that waited for the routes first."""
    if routes.experts is None or weight.dtype != x.dtype or not weight.is_contiguous():
        return False
    return _columns_of(weight, activation) % MIN_COLUMNS == 0 and weight.shape[2] % MIN_DEPTH == 0


def _columns_of(weight: Tensor, activation: str | None) -> int:
    return weight.shape[1] // (1 if activation is None else 2)


def multiply(
    x: Tensor,  # [T or R, K]
    weight: Tensor,  # [E, N, K], or with an activation [E, 2 * N, K]
    routes: Routes,
    *,
    weighs: bool,
    activation: str | None,
) -> Tensor:  # [R, N]
    """Multiplies each route's row by the matrix of its expert. See `experts.py`."""
    assert routes.experts is not None
    num_routes, num_matrices = routes.order.shape[0], 1 if activation is None else 2
    num_columns, width = _columns_of(weight, activation), weight.shape[2]
    out = torch.empty((num_routes, num_columns), dtype=x.dtype, device=x.device)
    tile = expert_tile(num_columns, width, is_gated=activation is not None)
    stage_bytes = (num_matrices * tile.columns + _ROWS) * tile.depth * x.element_size()
    _multiply_routes[(num_columns // tile.columns, num_routes)](
        x.contiguous(),
        weight,
        routes.order,
        routes.experts,
        routes.weights,
        out,
        num_routes,
        num_routes // x.shape[0],
        NUM_COLUMNS=num_columns,
        WIDTH=width,
        ROWS=_ROWS,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        # Rows of routes come from the kernel before: the one that let this one start has waited for the routes.
        IS_SECOND=x.shape[0] == num_routes,
        STAGES=fitting_stages(tile.stages, stage_bytes, x.device),
        WEIGHS=weighs,
        ACTIVATION=ACTIVATIONS[activation],
        num_warps=tile.num_warps,
        **dependent_launch(x.device),
    )
    return out


def expert_tile(num_columns: int, width: int, *, is_gated: bool) -> ExpertTile:
    """The best of a sweep on an H200 (`benchmarks/layer_time.py`) for 2,048 columns of 768 and 768 of 2,048."""
    if is_gated or num_columns % (2 * MIN_COLUMNS):
        return ExpertTile(MIN_COLUMNS, tile_depth(width, 128), 5, 4)
    return ExpertTile(2 * MIN_COLUMNS, MIN_DEPTH, 5, 4)


@triton.jit(do_not_specialize=["num_routes", "routes_per_row"])
def _multiply_routes(
    x,
    weight,
    order,
    experts,
    route_weights,
    out,
    num_routes,
    routes_per_row,  # routes that share a row of x
    NUM_COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_SECOND: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Computes a tile of columns of all routes of an expert."""
    if not IS_SECOND:
        wait_for_kernels_before(IS_DEPENDENT)
    let_next_start(IS_DEPENDENT)
    place = tl.program_id(1)
    lines = place + tl.arange(0, ROWS)
    # Not through the L1 cache, which may hold the routes of another layer where this is read before the wait.
    expert = tl.load(experts + place, cache_modifier=".cg")
    before = tl.load(experts + place - 1, mask=place > 0, other=-1, cache_modifier=".cg")
    others = tl.load(experts + lines, mask=lines < num_routes, other=-1, cache_modifier=".cg")
    routes = tl.load(order + lines, mask=lines < num_routes, other=0, cache_modifier=".cg")
    if expert == before:
        if IS_SECOND:
            wait_for_kernels_before(IS_DEPENDENT)
        return
    is_ours = others == expert
    if IS_SECOND:
        wait_for_kernels_before(IS_DEPENDENT)
    sums = multiply_by_columns(
        x, x, weight, weight, routes // routes_per_row, is_ours, expert, tl.program_id(0), out,
        NUM_COLUMNS, WIDTH, ROWS, COLUMNS, DEPTH, STAGES, False, 0, ACTIVATION,
    )  # fmt: skip
    store_columns(sums, route_weights, out, routes, is_ours, tl.program_id(0), NUM_COLUMNS, COLUMNS, WEIGHS)
