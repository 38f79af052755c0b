"""One row times weights of four bits, with the RMS norm before it and the gated activation after it.

    a program   16 columns of the output, or 8 of gate and of up, over the whole depth
    a warp      one block of 128 weights after the other, WARPS blocks further each time. Words are loaded into the
                registers in which the tensor cores take them, without shared memory in between, AHEAD chunks of WARPS
                blocks before they are used, the first before the kernel before has ended (`dependent_launch`)
    the row     reaches the warps through shared memory

The layout of an operand is given by the indexes of a load: Triton gives the low bits of an index to the threads of a
warp, the next to the warps, the high ones to registers. All that follows are reshapes, which move nothing. The depth of
an operand may have any order that is the same in both; where values come from `tl.join`, Triton gives a thread four
neighbours of each 16 (`kWidth`).

More blocks in one `tl.dot` would give wrong sums: with one column on its right side, Triton 3.6 confuses the operands
of a batch that is larger than the number of warps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.activation import ACTIVATIONS, gate
from headrace.kernels.gpu.dependent_launch import dependent_launch, let_next_start, wait_for_kernels_before
from headrace.kernels.gpu.int4_values import Int4Matrix, scale_of, value_pairs, zero_of, zero_pairs
from headrace.kernels.gpu.one_row import norm_scale
from headrace.kernels.layout import UnnormedRows

_BLOCK_LEN = 128


class OneRowTile(NamedTuple):
    ahead: int  # chunks whose words are loaded before they are used
    num_warps: int


def one_row_tile(num_columns: int, width: int) -> OneRowTile:
    """The best in a chain of an 8B's GEMMs on an H200, 2026-11-17; `num_columns` made no difference."""
    num_blocks = width // _BLOCK_LEN
    return OneRowTile(8, min(4, triton.next_power_of_2(num_blocks))) if num_blocks <= 32 else OneRowTile(4, 8)


def takes_one_row(matrix: Int4Matrix, *, is_gated: bool = False) -> bool:
    """Whether the kernel takes a matrix: whole tiles. Groups of less than 128 weights would be a batch."""
    is_whole = matrix.width % _BLOCK_LEN == 0 and matrix.num_columns % (32 if is_gated else 16) == 0
    return is_whole and matrix.groups == 1


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
        HAS_ZEROS=matrix.has_zeros,
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
    words_at, word_blocks = _places_of_words(first_column, half_stride, stride, WARPS)
    scales_at, scale_blocks = _places_of_scales(first_column, half_stride, stride, WARPS)
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
        sums += _scaled_sums(words[chunk], _operand_of_row(part, WARPS), scale[chunk], WARPS, HAS_ZEROS, IS_INTERPRETED)
    _store_columns(tl.sum(sums, axis=0), bias, out, first_column, num_columns, HAS_BIAS, ACTIVATION)


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


@triton.jit
def _places_of_words(first_column, half_stride, stride, WARPS: tl.constexpr):
    """Returns offsets [2 * WARPS * 8, 16] of words, and their blocks [..., 1]. Of 16 words a thread has four."""
    index = tl.arange(0, 2 * WARPS * 8)[:, None]
    eighth, warp, half = index % 8, index // 8 % WARPS, index // (8 * WARPS)
    column = first_column + half * half_stride + eighth
    return (warp * stride + column) * 16 + tl.arange(0, 16)[None, :], warp


@triton.jit
def _places_of_scales(first_column, half_stride, stride, WARPS: tl.constexpr):
    """Returns offsets [2 * WARPS * 8 * 4] of scales, and their blocks: four threads, which have the sums of the same
    column, load the same."""
    index = tl.arange(0, 2 * WARPS * 32)
    eighth, warp, half = index // 4 % 8, index // 32 % WARPS, index // (32 * WARPS)
    return warp * stride + first_column + half * half_stride + eighth, warp


@triton.jit
def _scaled_sums(words, row, scale, WARPS: tl.constexpr, HAS_ZEROS: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Returns the sums of each block, [WARPS, 16, 8], 8 times the same."""
    weight = _weight(words, row.dtype, WARPS, IS_INTERPRETED)
    sums = tl.dot(weight, row)
    if HAS_ZEROS:
        # What the weights lack: they are relative to the zero point 8.
        zero = _per_sum(zero_of(scale).to(tl.float32) - 8.0, WARPS)
        # Of the same layout as the weights, since it comes from `tl.join` too.
        one = tl.full([WARPS, 16, 64], 1.0, row.dtype)
        sums -= zero * tl.dot(tl.reshape(tl.join(one, one), [WARPS, 16, 128]), row)
        scale = scale_of(scale)
    return sums * _per_sum(scale, WARPS)


@triton.jit
def _per_sum(numbers, WARPS: tl.constexpr):
    """Repeats the numbers of columns, as the tensor cores return sums: 2 of 8 rows to a thread."""
    # 0 half, 1 warp, 2 eighth, 3 quarter
    numbers = tl.permute(tl.reshape(numbers, [2, WARPS, 8, 4]), (1, 0, 2, 3))
    numbers = tl.reshape(numbers, [WARPS, 16, 1, 4, 1])
    return tl.reshape(tl.broadcast_to(numbers, [WARPS, 16, 1, 4, 2]), [WARPS, 16, 8])


@triton.jit
def _weight(words, DTYPE: tl.constexpr, WARPS: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Widens words into the left operand, [WARPS, 16, 128]."""
    zero = zero_pairs(tl.full(words.shape, 8, tl.int32), DTYPE, IS_INTERPRETED)
    first = value_pairs(words, zero, 0, DTYPE, IS_INTERPRETED)
    second = value_pairs(words, zero, 1, DTYPE, IS_INTERPRETED)
    third = value_pairs(words, zero, 2, DTYPE, IS_INTERPRETED)
    fourth = value_pairs(words, zero, 3, DTYPE, IS_INTERPRETED)
    weight = tl.join(tl.join(first, second), tl.join(third, fourth))
    # 0 half, 1 warp, 2 eighth, 3 quarter, 4 and 5 word, 6 half of the word, 7 pair % 2, 8 pair / 2
    weight = tl.reshape(weight, [2, WARPS, 8, 4, 2, 2, 2, 2, 2])
    return tl.reshape(tl.permute(weight, (1, 0, 2, 8, 7, 5, 3, 4, 6)), [WARPS, 16, 128])


@triton.jit
def _store_columns(product, bias, out, first_column, num_columns, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr):
    """Stores the columns of a program, [16, 8], 8 times the same."""
    if ACTIVATION:
        gate_sums, up_sums = tl.split(tl.permute(tl.reshape(product, [2, 8, 8]), (1, 2, 0)))
        product = gate(gate_sums, up_sums, out, ACTIVATION)
    columns = first_column + tl.arange(0, product.shape[0])
    if HAS_BIAS:
        product += tl.load(bias + columns).to(tl.float32)[:, None]
    row = tl.arange(0, 8)
    at = out + row[None, :] * num_columns + columns[:, None]
    tl.store(at, product.to(out.dtype.element_ty), mask=row[None, :] < 1)
