"""One row times weights of four bits, with the RMS norm before it and the gated activation after it.

As in `few_rows_int4.py`, but a program multiplies a chunk of WARPS blocks after the other, one block to a warp, and the
row reaches the warps through shared memory. AHEAD chunks of words are in registers before the kernel before has ended.
More blocks in one `tl.dot` would give wrong sums: with one column on its right side, Triton 3.6 confuses the operands
of a batch that is larger than the number of warps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.dependent_launch import dependent_launch, let_next_start, wait_for_kernels_before
from headrace.kernels.gpu.few_rows import ACTIVATIONS, norm_scale
from headrace.kernels.gpu.few_rows_int4 import (
    Int4Matrix,
    places_of_scales,
    places_of_words,
    scaled_sums,
    store_columns,
)
from headrace.kernels.layout import UnnormedRows

_BLOCK_LEN = 128


class OneRowTile(NamedTuple):
    ahead: int  # chunks whose words are loaded before they are used
    num_warps: int


def one_row_tile(num_columns: int, width: int) -> OneRowTile:
    """The best in a chain of an 8B's layers on an H200 (`benchmarks/int4_kernel.py --chain --sweep`), 2026-11-17;
    `num_columns` made no difference."""
    num_blocks = width // _BLOCK_LEN
    return OneRowTile(8, min(4, triton.next_power_of_2(num_blocks))) if num_blocks <= 32 else OneRowTile(4, 8)


def takes_one_row(matrix: Int4Matrix) -> bool:
    """Whether the kernel takes a matrix that `few_rows_int4.can_multiply`: groups of less than 128 weights would be a
    batch."""
    return matrix.groups == 1


def multiply_one_row(
    matrix: Int4Matrix, x: Tensor | UnnormedRows, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Multiplies one row. With an activation the columns are gate and up."""
    norm = x if isinstance(x, UnnormedRows) else None
    row = x.x if isinstance(x, UnnormedRows) else x
    width = row.shape[1]
    num_columns = matrix.num_columns // (1 if activation is None else 2)
    out = torch.empty((1, num_columns), dtype=row.dtype, device=row.device)
    residual = None if norm is None else norm.residual
    tile = one_row_tile(matrix.num_columns, width)
    _multiply_row_int4[(num_columns // (16 if activation is None else 8),)](
        row.contiguous(),
        row if residual is None else residual,
        row if norm is None else norm.weight,
        row if norm is None or norm.total is None else norm.total,
        row if norm is None or norm.normed is None else norm.normed,
        matrix.packed,
        matrix.scales,
        matrix.packed if matrix.zeros is None else matrix.zeros,
        row if bias is None else bias,
        out,
        0.0 if norm is None else norm.eps,
        num_columns,
        WIDTH=width,
        WIDTH_BLOCK=triton.next_power_of_2(width),
        AHEAD=tile.ahead,
        WARPS=tile.num_warps,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        KEEPS_NORMED=norm is not None and norm.normed is not None,
        HAS_ZEROS=matrix.zeros is not None,
        HAS_BIAS=bias is not None,
        ACTIVATION=ACTIVATIONS[activation],
        num_warps=tile.num_warps,
        IS_INTERPRETED=triton.knobs.runtime.interpret,
        **dependent_launch(row.device),
    )
    return out


@triton.jit
def _multiply_row_int4(
    x,  # [WIDTH]
    residual,
    gain,
    total,
    normed,
    packed,
    scales,
    zeros,
    bias,
    out,  # [num_columns]
    eps,
    num_columns,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    WARPS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    KEEPS_NORMED: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,  # with one, the halves of 16 columns are gate and up
    IS_DEPENDENT: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Computes 16 columns, or 8 of gate and of up."""
    let_next_start(IS_DEPENDENT)
    NUM_BLOCKS: tl.constexpr = WIDTH // 128
    NUM_CHUNKS: tl.constexpr = (NUM_BLOCKS + WARPS - 1) // WARPS
    FIRST: tl.constexpr = min(AHEAD, NUM_CHUNKS)
    first_column = tl.program_id(0) * (8 if ACTIVATION else 16)
    if ACTIVATION:
        half_stride, stride = num_columns, num_columns * 2
    else:
        half_stride, stride = 8, num_columns
    words_at, word_blocks = places_of_words(first_column, half_stride, 16, stride, 1, 1, WARPS)
    scales_at, scale_blocks = places_of_scales(first_column, half_stride, 16, stride, 1, 1, WARPS, 1)
    step = tl.cast(stride, tl.int64) * WARPS  # from chunk to chunk
    words = (tl.load(packed + words_at, mask=word_blocks < NUM_BLOCKS, other=0),)
    scale = (tl.load(scales + scales_at, mask=scale_blocks < NUM_BLOCKS, other=0.0),)
    for chunk in tl.static_range(1, FIRST):
        is_inside = word_blocks < NUM_BLOCKS - chunk * WARPS
        words += (tl.load(packed + chunk * step * 16 + words_at, mask=is_inside, other=0),)  # type: ignore[assignment]
        is_scale = scale_blocks < NUM_BLOCKS - chunk * WARPS
        scale += (tl.load(scales + chunk * step + scales_at, mask=is_scale, other=0.0),)  # type: ignore[assignment]
    wait_for_kernels_before(IS_DEPENDENT)
    factor = 1.0
    if HAS_NORM:
        factor = norm_scale(x, residual, total, eps, WIDTH, WIDTH_BLOCK, HAS_RESIDUAL)
    sums = tl.zeros([WARPS, 16, 8], tl.float32)
    for chunk in tl.static_range(NUM_CHUNKS):
        if chunk + AHEAD < NUM_CHUNKS:
            later = chunk + AHEAD
            is_inside = word_blocks < NUM_BLOCKS - later * WARPS
            words += (tl.load(packed + later * step * 16 + words_at, mask=is_inside, other=0),)  # type: ignore[assignment]
            is_scale = scale_blocks < NUM_BLOCKS - later * WARPS
            scale += (tl.load(scales + later * step + scales_at, mask=is_scale, other=0.0),)  # type: ignore[assignment]
        depths = chunk * WARPS * 128 + tl.arange(0, WARPS * 128)
        part = _part_of_row(x, residual, gain, factor, depths, WIDTH, HAS_NORM, HAS_RESIDUAL)
        if KEEPS_NORMED:
            if tl.program_id(0) == 0:
                tl.store(normed + depths, part, mask=depths < WIDTH)
        sums += scaled_sums(
            words[chunk], _operand_of_row(part, WARPS), scale[chunk], zeros + chunk * step, scales_at, scale_blocks,
            NUM_BLOCKS - chunk * WARPS, 1, 1, 1, WARPS, 1, HAS_ZEROS, IS_INTERPRETED,
        )  # fmt: skip
    store_columns(tl.sum(sums, axis=0), bias, out, first_column, 1, num_columns, 1, HAS_BIAS, ACTIVATION)


@triton.jit
def _part_of_row(
    x,
    residual,
    gain,
    factor,
    depths,
    WIDTH: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    inside = depths < WIDTH
    part = tl.load(x + depths, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        part = part.to(tl.float32) + tl.load(residual + depths, mask=inside, other=0.0).to(tl.float32)
        part = part.to(x.dtype.element_ty)
    if HAS_NORM:
        part = part.to(tl.float32) * factor * tl.load(gain + depths, mask=inside, other=0.0)
    return part.to(x.dtype.element_ty)


@triton.jit
def _operand_of_row(row, WARPS: tl.constexpr):
    """Returns a chunk of the row as the right operand, [WARPS, 128, 1], in the order of the weights."""
    # 0 warp, 1 pair, 2 quarter, 3 and 4 word, 5 half of the word
    row = tl.reshape(row, [WARPS, 4, 4, 2, 2, 2])
    return tl.reshape(tl.permute(row, (0, 1, 4, 2, 3, 5)), [WARPS, 128, 1])
