"""One row times weights in its own type, without tensor cores: each program multiplies a few rows of the weight by x.
 The RMS norm before it and the gated activation after it are part of it. Its first weights
are loaded before the kernel before it has ended (`dependent_launch`).

Launch parameters: the best of sweeps on an H200 (`benchmarks/layer_time.py`), 2026-11-17, over shapes of 1B and 8B
models.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.activation import ACTIVATIONS, gate
from headrace.kernels.gpu.dependent_launch import dependent_launch, let_next_start, wait_for_kernels_before
from headrace.kernels.layout import UnnormedRows

MIN_DEPTH = 128  # of a tile
LARGE = 1 << 26  # elements of a weight, such as the head's; the loads of larger ones are pipelined
_WIDE = 8192
_MANY_COLUMNS = 1024


def multiply_one_row(
    row: Tensor | UnnormedRows,  # [1, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Multiplies one row, after its norm if that is left to the layer. With an activation the columns are gate and
    up."""
    norm = row if isinstance(row, UnnormedRows) else None
    x = row.x if isinstance(row, UnnormedRows) else row
    num_columns, width = weight.shape
    num_columns //= 1 if activation is None else 2
    tile = row_tile(num_columns, width, has_norm=norm is not None, is_gated=activation is not None)
    assert tile.stages == 1 or norm is None or norm.normed is None
    out = torch.empty((1, num_columns), dtype=x.dtype, device=x.device)
    residual = None if norm is None else norm.residual
    _multiply_row[(num_columns // tile.columns,)](
        x,
        x if residual is None else residual,
        x if norm is None else norm.weight,
        x if norm is None or norm.total is None else norm.total,
        x if norm is None or norm.normed is None else norm.normed,
        weight,
        x if bias is None else bias,
        out,
        0.0 if norm is None else norm.eps,
        num_columns,
        WIDTH=width,
        WIDTH_BLOCK=triton.next_power_of_2(width),
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        STAGES=tile.stages,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        KEEPS_NORMED=norm is not None and norm.normed is not None,
        HAS_BIAS=bias is not None,
        ACTIVATION=ACTIVATIONS[activation],
        num_warps=tile.num_warps,
        **dependent_launch(x.device),
    )
    return out


class RowTile(NamedTuple):
    columns: int  # rows of the weight, which are columns of the output
    depth: int
    num_warps: int
    stages: int  # of the loop over the depth; 1: the next tile is loaded by hand, the first before the wait


def row_tile(num_columns: int, width: int, *, has_norm: bool, is_gated: bool) -> RowTile:
    """The best in graphs of whole decode layers: what is best in a chain of GEMMs is not best between other kernels."""
    if num_columns * width > LARGE:
        return RowTile(16, tile_depth(width, 512), 4, 3)
    if is_gated:
        depth = tile_depth(width, 4096)
        return RowTile(2 if depth > 1024 else 4, depth, 4, 1)
    if width > _WIDE or (has_norm and num_columns >= _MANY_COLUMNS):
        return RowTile(8, tile_depth(width, 1024), 4, 1)
    return RowTile(4, tile_depth(width, 2048), 4, 1)


def tile_depth(width: int, largest: int) -> int:
    """The largest depth of a tile, down from `largest`, that divides the width, a multiple of `MIN_DEPTH`."""
    while width % largest:
        largest //= 2
    return largest


@triton.jit
def _multiply_row(
    x,
    residual,
    gain,
    total,
    normed,
    weight,
    bias,
    out,
    eps,
    num_columns,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    KEEPS_NORMED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Computes COLUMNS elements of the product of one row; with an activation, of both halves of the weight. The first
    program also stores the normed row, if it is wanted."""
    let_next_start(IS_DEPENDENT)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depths = tl.arange(0, DEPTH)
    first_at = weight + columns[:, None].to(tl.int64) * WIDTH + depths[None, :]
    second_at = first_at + num_columns.to(tl.int64) * WIDTH  # of the gate is up
    if STAGES == 1:
        first = tl.load(first_at)
        if ACTIVATION:
            second = tl.load(second_at)
    wait_for_kernels_before(IS_DEPENDENT)
    norm = 1.0
    if HAS_NORM:
        norm = norm_scale(x, residual, total, eps, WIDTH, WIDTH_BLOCK, HAS_RESIDUAL)
    sums = tl.zeros([COLUMNS, DEPTH], tl.float32)
    up_sums = tl.zeros([COLUMNS, DEPTH], tl.float32)
    if STAGES == 1:
        for depth in tl.static_range(0, WIDTH, DEPTH):
            if depth + DEPTH < WIDTH:
                next_first = tl.load(first_at + depth + DEPTH)
                if ACTIVATION:
                    next_second = tl.load(second_at + depth + DEPTH)
            row = _normed_part(x, residual, gain, norm, depth + depths, HAS_NORM, HAS_RESIDUAL)
            if KEEPS_NORMED:
                if tl.program_id(0) == 0:
                    tl.store(normed + depth + depths, row.to(normed.dtype.element_ty))
            sums += first.to(tl.float32) * row[None, :]
            if ACTIVATION:
                up_sums += second.to(tl.float32) * row[None, :]
            if depth + DEPTH < WIDTH:
                first = next_first
                if ACTIVATION:
                    second = next_second
    else:
        for depth in tl.range(0, WIDTH, DEPTH, num_stages=STAGES):
            row = _normed_part(x, residual, gain, norm, depth + depths, HAS_NORM, HAS_RESIDUAL)
            sums += tl.load(first_at + depth).to(tl.float32) * row[None, :]
            if ACTIVATION:
                up_sums += tl.load(second_at + depth).to(tl.float32) * row[None, :]
    product = tl.sum(sums, axis=1)
    if HAS_BIAS:
        product += tl.load(bias + columns).to(tl.float32)
    if ACTIVATION:
        product = gate(product, tl.sum(up_sums, axis=1), out, ACTIVATION)
    tl.store(out + columns, product.to(out.dtype.element_ty))


@triton.jit
def norm_scale(x, residual, total, eps, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    """Returns the factor of the RMS norm. The first program stores the sum of x and the residual stream."""
    columns = tl.arange(0, WIDTH_BLOCK)
    inside = columns < WIDTH
    line = tl.load(x + columns, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        # Rounded to the type of the residual stream before it is normed, as in the reference.
        line = line.to(tl.float32) + tl.load(residual + columns, mask=inside, other=0.0).to(tl.float32)
        line = line.to(x.dtype.element_ty)
        if tl.program_id(0) == 0:
            tl.store(total + columns, line, mask=inside)
    wide = line.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide) / WIDTH + eps)


@triton.jit
def _normed_part(x, residual, gain, scale, columns, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    """Returns a part of the row in float32, normed if asked."""
    row = tl.load(x + columns)
    if HAS_RESIDUAL:
        row = (row.to(tl.float32) + tl.load(residual + columns).to(tl.float32)).to(x.dtype.element_ty)
    if HAS_NORM:
        row = (row.to(tl.float32) * scale * tl.load(gain + columns)).to(x.dtype.element_ty)
    return row.to(tl.float32)
