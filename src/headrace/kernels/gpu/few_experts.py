"""Experts of a step with few tokens: one row per route, multiplied without tensor cores as fast as weights are read.

    gate and up    one program per route and a few columns, the activation included
    down           one program per token and a few columns: all routes of the token, weighted and summed

Routes need no order here. Two tokens with the same expert read its weights twice, which is rare while tokens are few.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.activation import ACTIVATIONS, gate
from headrace.kernels.gpu.dependent_launch import dependent_launch, wait_for_inputs
from headrace.kernels.gpu.one_row import MIN_DEPTH, tile_depth
from headrace.kernels.layout import Routes

FEW_TOKENS = 4
_UP_COLUMNS, _UP_DEPTH = 4, 2048
_DOWN_COLUMNS, _DOWN_DEPTH = 4, 256


def takes(up: Tensor, down: Tensor, num_tokens: int, activation: str) -> bool:  # [E, 2 * I, H], [E, H, I]
    """Whether the kernels of this file compute the step: few tokens and whole tiles."""
    hidden_size, width = down.shape[1:]
    fits = hidden_size % MIN_DEPTH == 0 and width % MIN_DEPTH == 0 and activation in ACTIVATIONS
    return 0 < num_tokens <= FEW_TOKENS and fits and up.is_contiguous() and down.is_contiguous()


def compute(up: Tensor, down: Tensor, x: Tensor, routes: Routes, activation: str) -> Tensor:  # [T, H] -> [T, H]
    assert routes.chosen is not None
    num_tokens, hidden_size = x.shape
    width, num_routes = down.shape[2], routes.chosen.shape[0]
    num_chosen = num_routes // num_tokens
    narrow = torch.empty((num_routes, width), dtype=x.dtype, device=x.device)
    _gate_up[(width // _UP_COLUMNS, num_routes)](
        x.contiguous(),
        up,
        routes.chosen,
        narrow,
        NUM_CHOSEN=num_chosen,
        WIDTH=hidden_size,
        NUM_COLUMNS=width,
        COLUMNS=_UP_COLUMNS,
        DEPTH=tile_depth(hidden_size, _UP_DEPTH),
        ACTIVATION=ACTIVATIONS[activation],
        num_warps=4,
        **dependent_launch(x.device),
    )
    out = torch.empty_like(x)
    _down[(hidden_size // _DOWN_COLUMNS, num_tokens)](
        narrow,
        down,
        routes.chosen,
        routes.weights,
        out,
        NUM_CHOSEN=num_chosen,
        CHOSEN_BLOCK=triton.next_power_of_2(num_chosen),
        WIDTH=width,
        NUM_COLUMNS=hidden_size,
        COLUMNS=_DOWN_COLUMNS,
        DEPTH=tile_depth(width, _DOWN_DEPTH),
        num_warps=4,
        **dependent_launch(x.device),
    )
    return out


@triton.jit
def _gate_up(
    x,
    weight,
    chosen,
    out,
    NUM_CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_inputs(IS_DEPENDENT)
    route = tl.program_id(1)
    expert = tl.load(chosen + route).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depths = tl.arange(0, DEPTH)
    gate_at = weight + (expert * 2 * NUM_COLUMNS + columns)[:, None] * WIDTH + depths[None, :]
    up_at = gate_at + NUM_COLUMNS * WIDTH
    row_at = x + route // NUM_CHOSEN * WIDTH + depths
    gate_sums = tl.zeros([COLUMNS, DEPTH], tl.float32)
    up_sums = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for depth in tl.static_range(0, WIDTH, DEPTH):
        row = tl.load(row_at + depth).to(tl.float32)[None, :]
        gate_sums += tl.load(gate_at + depth).to(tl.float32) * row
        up_sums += tl.load(up_at + depth).to(tl.float32) * row
    gated = gate(tl.sum(gate_sums, axis=1), tl.sum(up_sums, axis=1), out, ACTIVATION)
    tl.store(out + route * NUM_COLUMNS + columns, gated.to(out.dtype.element_ty))


@triton.jit
def _down(
    x,
    weight,
    chosen,
    route_weights,
    out,
    NUM_CHOSEN: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """The rows of a tile are the columns of the output for each choice of the token."""
    wait_for_inputs(IS_DEPENDENT)
    token = tl.program_id(1)
    rows = tl.arange(0, CHOSEN_BLOCK * COLUMNS)
    choices = rows // COLUMNS
    is_choice = choices < NUM_CHOSEN
    routes = token * NUM_CHOSEN + choices
    experts = tl.load(chosen + routes, mask=is_choice, other=0).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + rows % COLUMNS
    depths = tl.arange(0, DEPTH)
    matrix_at = weight + (experts * NUM_COLUMNS + columns)[:, None] * WIDTH + depths[None, :]
    row_at = x + routes[:, None] * WIDTH + depths[None, :]
    sums = tl.zeros([CHOSEN_BLOCK * COLUMNS, DEPTH], tl.float32)
    for depth in tl.static_range(0, WIDTH, DEPTH):
        matrix = tl.load(matrix_at + depth, mask=is_choice[:, None], other=0.0)
        row = tl.load(row_at + depth, mask=is_choice[:, None], other=0.0)
        sums += matrix.to(tl.float32) * row.to(tl.float32)
    products = tl.sum(sums, axis=1) * tl.load(route_weights + routes, mask=is_choice, other=0.0)
    total = tl.sum(tl.reshape(products, [CHOSEN_BLOCK, COLUMNS]), axis=0)
    at = out + token * NUM_COLUMNS + tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(at, total.to(out.dtype.element_ty))
