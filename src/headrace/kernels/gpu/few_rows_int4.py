"""GEMMs of 2 to 16 rows with weights of four bits, on tensor cores for integers.

weights     a packed word has eight weights (`int4.py`). Minus their zero point 8, times 16, they are integers of
            eight bits after three instructions, in the registers in which the tensor cores take them: four from
            the low halves of its bytes, four from the high halves
rows        two parts of eight bits (`row_parts.py`), in the order that this gives to the weights of a block
sums        exact within a block of 128 weights, then multiplied by its scale, in float32
a program   64 or 128 columns, half of them gate and half up with the gated activation, which is part of the
            kernel, over all blocks or a part of them. It loads its first blocks before the kernel before it has
            ended (`dependent_launch`)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.activation import ACTIVATIONS, gate
from headrace.kernels.gpu.dependent_launch import dependent_launch, let_next_start, wait_for_kernels_before
from headrace.kernels.gpu.int4_values import Int4Matrix, scale_of, zero_of
from headrace.kernels.gpu.row_parts import split_rows, sum_of_parts
from headrace.kernels.layout import UnnormedRows

MAX_ROWS = 16
_ROWS_BLOCK = 16  # the smallest side of a tensor core product
_BLOCK_LEN = 128
_MIN_COLUMNS = 64  # of a tile: tensor cores take 64 rows of the weight
_MANY_TILES = 192  # of 128 columns
_NUM_PROGRAMS = 384  # wanted
_FEW_BLOCKS = 4


class FewRowsTile(NamedTuple):
    columns: int
    ahead: int  # blocks of 128 weights that are loaded before the wait
    stages: int
    splits: int  # programs that share the blocks of a tile
    num_warps: int = 4


def few_rows_tile(num_columns: int, width: int, *, is_gated: bool) -> FewRowsTile:
    """The best of a sweep over graphs of whole layers of an 8B with 4 and 16 rows on an H200
    (`benchmarks/layer_time.py`), 2026-11-17. `num_columns` is that of the matrix, with gate and up."""
    num_blocks, is_wide = width // _BLOCK_LEN, num_columns % (2 * _MIN_COLUMNS) == 0
    if is_gated:
        columns = 2 * _MIN_COLUMNS if is_wide and num_columns >= _MANY_TILES * 2 * _MIN_COLUMNS else _MIN_COLUMNS
        return FewRowsTile(columns, min(_FEW_BLOCKS, num_blocks), 5, 1)
    dividing = [splits for splits in (1, 2, 4, 8) if num_blocks % splits == 0]
    enough = (splits for splits in dividing if splits * num_columns >= _NUM_PROGRAMS * _MIN_COLUMNS)
    splits = next(enough, dividing[-1])
    if num_blocks // splits > _FEW_BLOCKS:
        return FewRowsTile(_MIN_COLUMNS, 0, 6, splits)
    wide = FewRowsTile(2 * _MIN_COLUMNS, num_blocks // splits, 3, splits, num_warps=8)
    return wide if is_wide else wide._replace(columns=_MIN_COLUMNS, num_warps=4)


def can_multiply(matrix: Int4Matrix, *, is_gated: bool = False) -> bool:
    """Whether the kernel takes a matrix: whole tiles, and one scale to a block."""
    width_is_whole = matrix.width % _BLOCK_LEN == 0
    return width_is_whole and matrix.groups == 1 and matrix.num_columns % (_MIN_COLUMNS * (2 if is_gated else 1)) == 0


def multiply_few_rows(
    matrix: Int4Matrix, rows: Tensor | UnnormedRows, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Multiplies up to 16 rows, after their norm if that is left to the layer. With an activation the columns are gate
    and up."""
    x = rows.x if isinstance(rows, UnnormedRows) else rows
    num_rows, width = x.shape
    is_gated = activation is not None
    num_columns = matrix.num_columns // (2 if is_gated else 1)
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    tile = few_rows_tile(matrix.num_columns, width, is_gated=is_gated)
    parts = split_rows(rows, torch.int8, for_int4=True, adds_blocks=matrix.has_zeros)
    num_partial = tile.splits * matrix.num_columns * _ROWS_BLOCK if tile.splits > 1 else 0
    _multiply_rows_int4[(matrix.num_columns // tile.columns, tile.splits)](
        parts.values,
        parts.units,
        parts.block_sums,
        matrix.packed.view(torch.int8),
        matrix.scales,
        x if bias is None else bias,
        out,
        torch.empty(num_partial, dtype=torch.float32, device=x.device),
        matrix.arrivals,
        num_rows,
        num_columns,
        WIDTH=width,
        ROWS=_ROWS_BLOCK,
        COLUMNS=tile.columns,
        AHEAD=tile.ahead,
        STAGES=tile.stages,
        SPLITS=tile.splits,
        HAS_ZEROS=matrix.has_zeros,
        HAS_BIAS=bias is not None,
        ACTIVATION=ACTIVATIONS[activation],
        num_warps=tile.num_warps,
        IS_INTERPRETED=triton.knobs.runtime.interpret,
        **dependent_launch(x.device),
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_rows_int4(
    x,  # [2, num_rows, WIDTH] int8
    units,  # [num_rows] float32
    block_sums,  # [WIDTH / 128, ROWS] float32
    packed,  # [WIDTH / 128, columns of the matrix, 64] int8
    scales,  # [WIDTH / 128, columns of the matrix] float32
    bias,
    out,  # [num_rows, num_columns]
    partial,  # [SPLITS, programs, COLUMNS, ROWS] float32
    arrivals,
    num_rows,
    num_columns,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    let_next_start(IS_DEPENDENT)
    OUT_COLUMNS: tl.constexpr = COLUMNS // 2 if ACTIVATION else COLUMNS
    first_column = tl.program_id(0) * OUT_COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    stride = num_columns
    if ACTIVATION:
        columns += tl.where(tl.arange(0, COLUMNS) < OUT_COLUMNS, 0, num_columns - OUT_COLUMNS)
        stride = num_columns * 2
    NUM_BLOCKS: tl.constexpr = WIDTH // 128 // SPLITS
    first_block = tl.program_id(1) * NUM_BLOCKS
    bytes_at = packed + columns[:, None] * 64 + tl.arange(0, 64)[None, :]
    if AHEAD:
        at = tl.cast(first_block, tl.int64) * stride
        words = (tl.load(bytes_at + at * 64),)
        scale = (tl.load(scales + at + columns),)
        for index in tl.static_range(1, AHEAD):
            at = tl.cast(first_block + index, tl.int64) * stride
            words += (tl.load(bytes_at + at * 64),)  # type: ignore[assignment]
            scale += (tl.load(scales + at + columns),)  # type: ignore[assignment]
    wait_for_kernels_before(IS_DEPENDENT)
    lines = tl.arange(0, 2 * ROWS)
    rows_at = x + (lines // ROWS * num_rows + lines % ROWS)[:, None] * WIDTH + tl.arange(0, 64)[None, :]
    rows = tl.arange(0, ROWS)
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for index in tl.static_range(AHEAD):
        sums += _sums_of_block(
            words[index], scale[index], rows_at, num_rows, block_sums, first_block + index,
            COLUMNS, ROWS, HAS_ZEROS, IS_INTERPRETED,
        )  # fmt: skip
    if AHEAD < NUM_BLOCKS:
        for block in tl.range(first_block + AHEAD, first_block + NUM_BLOCKS, num_stages=STAGES):
            at = tl.cast(block, tl.int64) * stride
            sums += _sums_of_block(
                tl.load(bytes_at + at * 64), tl.load(scales + at + columns), rows_at, num_rows, block_sums, block,
                COLUMNS, ROWS, HAS_ZEROS, IS_INTERPRETED,
            )  # fmt: skip
    sums *= tl.load(units + rows, mask=rows < num_rows, other=0.0)[None, :] * 0.0625
    if SPLITS > 1:
        partial += tl.program_id(0) * (COLUMNS * ROWS) + tl.arange(0, COLUMNS)[:, None] * ROWS + rows[None, :]
        size = tl.num_programs(0) * (COLUMNS * ROWS)
        tl.store(partial + tl.program_id(1) * size, sums)
        tl.debug_barrier()  # the whole program has stored its sums before it counts as arrived
        arrival = arrivals + tl.program_id(0)
        if tl.atomic_add(arrival, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(arrival, 0)  # the next kernel expects zeros
        sums = tl.zeros([COLUMNS, ROWS], tl.float32)
        for split in tl.static_range(SPLITS):  # always in this order, so that results repeat exactly
            sums += tl.load(partial + split * size, cache_modifier=".cg")
    if ACTIVATION:
        gate_sums, up_sums = tl.split(tl.permute(tl.reshape(sums, [2, OUT_COLUMNS, ROWS]), (1, 2, 0)))
        sums = gate(gate_sums, up_sums, out, ACTIVATION).to(tl.float32)
    out_columns = first_column + tl.arange(0, OUT_COLUMNS)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + out_columns).to(tl.float32)
    at_out = out + rows[None, :] * num_columns + out_columns
    tl.store(at_out, sums.to(out.dtype.element_ty), mask=rows[None, :] < num_rows)


@triton.jit
def _sums_of_block(
    words,
    scale,
    rows_at,
    num_rows,
    block_sums,
    block,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Returns the sums of a block of 128 weights, times 16, in units of the rows, [COLUMNS, ROWS]."""
    is_line = (tl.arange(0, 2 * ROWS) % ROWS)[:, None] < num_rows
    low_rows = tl.trans(tl.load(rows_at + block * 128, mask=is_line, other=0))
    high_rows = tl.trans(tl.load(rows_at + block * 128 + 64, mask=is_line, other=0))
    low, high = _halves(words, IS_INTERPRETED)
    part = tl.dot(low, low_rows, out_dtype=tl.int32)
    part = tl.dot(high, high_rows, part, out_dtype=tl.int32)
    sums = sum_of_parts(part, 256, COLUMNS, ROWS)  # at most 2**29: 128 weights of 128 by rows of 2**15
    if HAS_ZEROS:
        rows = tl.arange(0, ROWS)
        row_sums = tl.load(block_sums + block * ROWS + rows, mask=rows < num_rows, other=0.0)
        sums -= (zero_of(scale).to(tl.float32) * 16.0 - 128.0)[:, None] * row_sums[None, :]
        scale = scale_of(scale)
    return sums * scale[:, None]


# The low halves of four bytes, and the high halves: minus 8, times 16.
_HALVES: tl.constexpr = tl.constexpr(
    "{ .reg .b32 t; shl.b32 t, $2, 4; lop3.b32 $0, t, 0xf0f0f0f0, 0x80808080, 0x6a; "
    "lop3.b32 $1, $2, 0xf0f0f0f0, 0x80808080, 0x6a; }"
)


@triton.jit
def _halves(words, IS_INTERPRETED: tl.constexpr):
    if IS_INTERPRETED:
        return ((words << 4) ^ -128).to(tl.int8), ((words & -16) ^ -128).to(tl.int8)
    else:
        return tl.inline_asm_elementwise(_HALVES, "=r,=r,r", [words], dtype=(tl.int8, tl.int8), is_pure=True, pack=4)
