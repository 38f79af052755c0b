"""GEMMs of 2 to 16 rows with weights of four bits, and what the kernel for one row (`one_row_int4.py`) shares with it.
With few rows a kernel is as fast as its loads.

    a program      PIECES * 16 columns of the output, or half as many of gate and of up, over the whole depth, so that
                   no sums are merged in memory. With many rows this would read them too often: then the depth is split
    a warp         every WARPS-th block of 128 weights of these columns. Its words are loaded into the registers in
                   which the tensor cores take them, without shared memory in between, HELD blocks at a time, the first
                   before the kernel before has ended (`dependent_launch`): weights never change
    rows           are loaded by each warp in the layout of its operand

The gated activation after the GEMM is part of the kernel.

The layout of an operand is given by the indexes of a load: Triton gives the low bits of an index to the threads of a
warp, the next to the warps, the high ones to registers. All that follows are reshapes, which move nothing. The depth of
an operand may have any order that is the same in both; where values come from `tl.join`, Triton gives a thread four
neighbours of each 16 (`kWidth`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.dependent_launch import dependent_launch, let_next_start, wait_for_kernels_before
from headrace.kernels.gpu.few_rows import ACTIVATIONS, gate
from headrace.kernels.gpu.int4_values import value_pairs, zero_pairs

MAX_ROWS = 16
_BLOCK_LEN = 128
_FEW_COLUMNS = 4096


class FewRowsTile(NamedTuple):
    pieces: int  # of 16 columns
    held: int  # blocks of a warp that are multiplied together
    num_warps: int
    splits: int = 1  # of the depth over programs, whose sums are merged in memory
    max_registers: int | None = None  # of a thread; more let the compiler load further ahead


def few_rows_tile(num_rows: int, num_columns: int, width: int, *, is_gated: bool) -> FewRowsTile:
    """The best in a chain of an 8B's layers on an H200 (`benchmarks/int4_kernel.py --chain --sweep`), 2026-11-17."""
    num_blocks = width // _BLOCK_LEN
    num_warps = min(8, triton.next_power_of_2(num_blocks))
    held = 2 if num_blocks >= 2 * num_warps and not is_gated else 1
    if num_rows <= 8:
        return FewRowsTile(1, held, num_warps)
    if num_columns % 64:
        return FewRowsTile(1, 1, num_warps)
    if is_gated:
        return FewRowsTile(2, 1, min(4, num_warps), max_registers=128)
    if num_blocks % 4 == 0 and num_columns <= _FEW_COLUMNS:
        return FewRowsTile(4, 1, 4, splits=4)
    return FewRowsTile(1, 1, num_warps)


class Int4Matrix(NamedTuple):
    """A matrix in the form of `int4.py`."""

    packed: Tensor  # [K / 128, N, 16] int32
    scales: Tensor  # [groups, N] float32
    zeros: Tensor | None  # [groups, N] uint8
    groups: int  # of 128 weights: 1, 2 or 4
    arrivals: Tensor  # [N / 16] int32 or more, zeros before and after each kernel

    @property
    def num_columns(self) -> int:
        return self.packed.shape[1]


def can_multiply(num_columns: int, width: int, *, is_gated: bool = False) -> bool:
    """Whether the kernel takes a matrix: whole tiles."""
    return width % _BLOCK_LEN == 0 and num_columns % 16 == 0 and not (is_gated and num_columns % 32)


def multiply_few_rows(
    matrix: Int4Matrix, x: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Multiplies up to 16 rows. With an activation the columns are gate and up."""
    num_rows, width = x.shape
    is_gated = activation is not None
    num_columns = matrix.num_columns // (2 if is_gated else 1)
    tile = few_rows_tile(num_rows, matrix.num_columns, width, is_gated=is_gated)
    columns = tile.pieces * (8 if is_gated else 16)
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    options = {} if tile.max_registers is None or x.device.type != "cuda" else {"maxnreg": tile.max_registers}
    num_tiles = num_columns // columns
    num_partial = tile.splits * num_tiles * tile.pieces * 16 * 16 if tile.splits > 1 else 0
    _multiply_few_int4[(num_tiles, tile.splits)](
        x.contiguous(),
        matrix.packed,
        matrix.scales,
        matrix.packed if matrix.zeros is None else matrix.zeros,
        x if bias is None else bias,
        out,
        torch.empty(num_partial, dtype=torch.float32, device=x.device),
        matrix.arrivals,
        num_rows,
        num_columns,
        WIDTH=width,
        ROWS=8 if num_rows <= 8 else 16,
        PIECES=tile.pieces,
        HELD=tile.held,
        WARPS=tile.num_warps,
        SPLITS=tile.splits,
        GROUPS=matrix.groups,
        HAS_ZEROS=matrix.zeros is not None,
        HAS_BIAS=bias is not None,
        ACTIVATION=ACTIVATIONS[activation],
        num_warps=tile.num_warps,
        IS_INTERPRETED=triton.knobs.runtime.interpret,
        **options,
        **dependent_launch(x.device),
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_few_int4(
    x,  # [num_rows, WIDTH]
    packed,
    scales,
    zeros,
    bias,
    out,  # [num_rows, num_columns]
    partial,  # [SPLITS, programs, PIECES * 16, ROWS] float32
    arrivals,
    num_rows,
    num_columns,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,  # 8 or 16
    PIECES: tl.constexpr,
    HELD: tl.constexpr,
    WARPS: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,  # with one, the halves of a piece are gate and up
    IS_DEPENDENT: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    let_next_start(IS_DEPENDENT)
    TILE: tl.constexpr = HELD * WARPS  # blocks
    NUM_BLOCKS: tl.constexpr = WIDTH // 128 // SPLITS
    COLUMNS: tl.constexpr = PIECES * (8 if ACTIVATION else 16)
    first_column = tl.program_id(0) * COLUMNS
    if ACTIVATION:
        half_stride, piece_stride, stride = num_columns, 8, num_columns * 2
    else:
        half_stride, piece_stride, stride = 8, 16, num_columns
    # Where a thread's words and scales are, in a tile that begins at block 0.
    words_at, word_blocks = places_of_words(first_column, half_stride, piece_stride, stride, PIECES, HELD, WARPS)
    scales_at, scale_blocks = places_of_scales(
        first_column, half_stride, piece_stride, stride, PIECES, HELD, WARPS, GROUPS
    )
    split_block = tl.program_id(1) * NUM_BLOCKS
    step = tl.cast(stride, tl.int64) * TILE  # from tile to tile
    packed += tl.cast(split_block, tl.int64) * stride * 16
    scales += tl.cast(split_block, tl.int64) * stride * GROUPS
    zeros += tl.cast(split_block, tl.int64) * stride * GROUPS
    words = tl.load(packed + words_at, mask=word_blocks < NUM_BLOCKS, other=0)
    scale = tl.load(scales + scales_at, mask=scale_blocks < NUM_BLOCKS, other=0.0)
    AHEAD: tl.constexpr = 2 if PIECES * HELD <= 2 else 1  # tiles whose words are loaded before they are used
    if NUM_BLOCKS > TILE and AHEAD == 2:
        packed += step * 16
        next_words = tl.load(packed + words_at, mask=word_blocks < NUM_BLOCKS - TILE, other=0)
    wait_for_kernels_before(IS_DEPENDENT)
    x += split_block * 128
    if NUM_BLOCKS <= TILE:
        rows = _load_rows(x, 0, num_rows, NUM_BLOCKS, WIDTH, ROWS, HELD, WARPS)
        row = _operand(rows, ROWS, HELD, WARPS, GROUPS)
        sums = scaled_sums(
            words, row, scale, zeros, scales_at, scale_blocks, NUM_BLOCKS,
            ROWS, PIECES, HELD, WARPS, GROUPS, HAS_ZEROS, IS_INTERPRETED,
        )  # fmt: skip
    else:
        sums = tl.zeros([HELD * GROUPS * WARPS, PIECES * 16, ROWS], tl.float32)
        for block in tl.range(0, NUM_BLOCKS, TILE, num_stages=1):
            rows = _load_rows(x, block, num_rows, NUM_BLOCKS, WIDTH, ROWS, HELD, WARPS)
            row = _operand(rows, ROWS, HELD, WARPS, GROUPS)
            packed += step * 16
            later_words = tl.load(packed + words_at, mask=word_blocks < NUM_BLOCKS - AHEAD * TILE - block, other=0)
            scales += step * GROUPS
            next_scale = tl.load(scales + scales_at, mask=scale_blocks < NUM_BLOCKS - TILE - block, other=0.0)
            sums += scaled_sums(
                words, row, scale, zeros, scales_at, scale_blocks, NUM_BLOCKS - block,
                ROWS, PIECES, HELD, WARPS, GROUPS, HAS_ZEROS, IS_INTERPRETED,
            )  # fmt: skip
            zeros += step * GROUPS
            scale = next_scale
            if AHEAD == 2:
                words, next_words = next_words, later_words
            else:
                words = later_words
    product = tl.sum(sums, axis=0)
    if SPLITS > 1:
        out_rows = tl.arange(0, product.shape[1])[None, :]
        places = tl.arange(0, product.shape[0])[:, None] * product.shape[1] + out_rows
        at = partial + tl.program_id(0) * (product.shape[0] * product.shape[1]) + places
        size = tl.num_programs(0) * (product.shape[0] * product.shape[1])
        tl.store(at + tl.program_id(1) * size, product, mask=out_rows < num_rows)
        tl.debug_barrier()  # the whole program has stored its sums before it counts as arrived
        arrival = arrivals + tl.program_id(0)
        if tl.atomic_add(arrival, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(arrival, 0)  # the next kernel expects zeros
        product = tl.zeros(product.shape, tl.float32)
        for split in tl.static_range(SPLITS):  # always in this order, so that results repeat exactly
            product += tl.load(at + split * size, mask=out_rows < num_rows, other=0.0, cache_modifier=".cg")
    store_columns(product, bias, out, first_column, num_rows, num_columns, PIECES, HAS_BIAS, ACTIVATION)


@triton.jit
def places_of_words(
    first_column,
    half_stride,
    piece_stride,
    stride,
    PIECES: tl.constexpr,
    HELD: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Returns offsets [HELD * PIECES * 2 * WARPS * 8, 16] of words, and their blocks [..., 1]. Of 16 words a thread has
    four."""
    index = tl.arange(0, HELD * PIECES * 2 * WARPS * 8)[:, None]
    eighth, warp, half = index % 8, index // 8 % WARPS, index // (8 * WARPS) % 2
    piece, held = index // (16 * WARPS) % PIECES, index // (16 * WARPS * PIECES)
    block = held * WARPS + warp
    column = first_column + piece * piece_stride + half * half_stride + eighth
    return (block * stride + column) * 16 + tl.arange(0, 16)[None, :], block


@triton.jit
def places_of_scales(
    first_column,
    half_stride,
    piece_stride,
    stride,
    PIECES: tl.constexpr,
    HELD: tl.constexpr,
    WARPS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Returns offsets [HELD * GROUPS * PIECES * 2 * WARPS * 8 * 4] of scales, and their blocks: four threads, which
    have the sums of the same column, load the same."""
    index = tl.arange(0, HELD * GROUPS * PIECES * 2 * WARPS * 32)
    eighth, warp, half = index // 4 % 8, index // 32 % WARPS, index // (32 * WARPS) % 2
    piece = index // (64 * WARPS) % PIECES
    group, held = index // (64 * WARPS * PIECES) % GROUPS, index // (64 * WARPS * PIECES * GROUPS)
    block = held * WARPS + warp
    column = first_column + piece * piece_stride + half * half_stride + eighth
    return (block * GROUPS + group) * stride + column, block


@triton.jit
def _load_rows(
    x,
    first_block,
    num_rows,
    NUM_BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    HELD: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Loads a tile of rows, [ROWS * HELD * 4 * WARPS, 32], as `_operand` takes it."""
    index = tl.arange(0, ROWS * HELD * 4 * WARPS)[:, None]
    eighth, warp, pair = index % 8, index // 8 % WARPS, index // (8 * WARPS) % 4
    held, octet = index // (32 * WARPS) % HELD, index // (32 * WARPS * HELD)
    block = first_block + held * WARPS + warp
    row = octet * 8 + eighth
    inside = (row < num_rows) & (block < NUM_BLOCKS)
    return tl.load(x + row * WIDTH + block * 128 + pair * 32 + tl.arange(0, 32)[None, :], mask=inside, other=0.0)


@triton.jit
def _operand(rows, ROWS: tl.constexpr, HELD: tl.constexpr, WARPS: tl.constexpr, GROUPS: tl.constexpr):
    """Returns rows as the right operand, [HELD * GROUPS * WARPS, 128 / GROUPS, ROWS]."""
    # 0 octet, 1 held, 2 group, 3 pair, 4 warp, 5 eighth, 6 quarter, 7 and 8 word, 9 half of the word
    rows = tl.reshape(rows, [ROWS // 8, HELD, GROUPS, 4 // GROUPS, WARPS, 8, 4, 2, 2, 2])
    rows = tl.permute(rows, (1, 2, 4, 3, 8, 6, 7, 9, 0, 5))
    return tl.reshape(rows, [HELD * GROUPS * WARPS, 128 // GROUPS, ROWS])


@triton.jit
def scaled_sums(
    words,
    row,
    scale,
    zeros,
    zeros_at,
    blocks,
    num_blocks,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    HELD: tl.constexpr,
    WARPS: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Returns the sums of each group, [HELD * GROUPS * WARPS, PIECES * 16, ROWS]; of one row (`one_row_int4.py`) 8
    times the same."""
    weight = _weight(words, row.dtype, PIECES, HELD, WARPS, GROUPS, IS_INTERPRETED)
    sums = tl.dot(weight, row)
    if HAS_ZEROS:
        # What the weights lack: they are relative to the zero point 8.
        zero = tl.load(zeros + zeros_at, mask=blocks < num_blocks, other=8).to(tl.float32) - 8.0
        zero = _per_sum(zero, ROWS, PIECES, HELD, WARPS, GROUPS)
        # Of the same layout as the weights, since it comes from `tl.join` too.
        one = tl.full([HELD * GROUPS * WARPS, PIECES * 16, 64 // GROUPS], 1.0, row.dtype)
        ones = tl.reshape(tl.join(one, one), [HELD * GROUPS * WARPS, PIECES * 16, 128 // GROUPS])
        sums -= zero * tl.dot(ones, row)
    return sums * _per_sum(scale, ROWS, PIECES, HELD, WARPS, GROUPS)


@triton.jit
def _per_sum(
    numbers, ROWS: tl.constexpr, PIECES: tl.constexpr, HELD: tl.constexpr, WARPS: tl.constexpr, GROUPS: tl.constexpr
):
    """Repeats the numbers of columns for each row, as the tensor cores return sums: 2 of 8 rows to a thread."""
    # 0 held, 1 group, 2 piece, 3 half, 4 warp, 5 eighth, 6 quarter
    numbers = tl.reshape(numbers, [HELD, GROUPS, PIECES, 2, WARPS, 8, 4])
    numbers = tl.permute(numbers, (0, 1, 4, 2, 3, 5, 6))
    numbers = tl.reshape(numbers, [HELD * GROUPS * WARPS, PIECES * 16, 1, 4, 1])
    octets: tl.constexpr = 1 if ROWS == 1 else ROWS // 8
    numbers = tl.broadcast_to(numbers, [HELD * GROUPS * WARPS, PIECES * 16, octets, 4, 2])
    return tl.reshape(numbers, [HELD * GROUPS * WARPS, PIECES * 16, octets * 8])


@triton.jit
def _weight(
    words,
    DTYPE: tl.constexpr,
    PIECES: tl.constexpr,
    HELD: tl.constexpr,
    WARPS: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Widens words into the left operand, [HELD * GROUPS * WARPS, PIECES * 16, 128 / GROUPS]."""
    zero = zero_pairs(tl.full(words.shape, 8, tl.int32), DTYPE, IS_INTERPRETED)
    first = value_pairs(words, zero, 0, DTYPE, IS_INTERPRETED)
    second = value_pairs(words, zero, 1, DTYPE, IS_INTERPRETED)
    third = value_pairs(words, zero, 2, DTYPE, IS_INTERPRETED)
    fourth = value_pairs(words, zero, 3, DTYPE, IS_INTERPRETED)
    weight = tl.join(tl.join(first, second), tl.join(third, fourth))
    # 0 held, 1 piece, 2 half, 3 warp, 4 eighth, 5 quarter, 6 and 7 word, 8 half of the word, 9 pair % 2, 10 pair / 2
    weight = tl.reshape(weight, [HELD, PIECES, 2, WARPS, 8, 4, 2, 2, 2, 2, 2])
    if GROUPS == 1:
        weight = tl.permute(weight, (0, 3, 1, 2, 4, 10, 9, 7, 5, 6, 8))
    elif GROUPS == 2:
        weight = tl.permute(weight, (0, 10, 3, 1, 2, 4, 9, 7, 5, 6, 8))
    else:
        weight = tl.permute(weight, (0, 10, 9, 3, 1, 2, 4, 7, 5, 6, 8))
    return tl.reshape(weight, [HELD * GROUPS * WARPS, PIECES * 16, 128 // GROUPS])


@triton.jit
def store_columns(
    product,
    bias,
    out,
    first_column,
    num_rows,
    num_columns,
    PIECES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Stores the columns of a program, [PIECES * 16, ROWS]."""
    rows: tl.constexpr = product.shape[1]
    if ACTIVATION:
        halves = tl.permute(tl.reshape(product, [PIECES, 2, 8, rows]), (0, 2, 3, 1))
        gate_sums, up_sums = tl.split(halves)
        product = tl.reshape(gate(gate_sums, up_sums, out, ACTIVATION), [PIECES * 8, rows])
    columns = first_column + tl.arange(0, product.shape[0])
    if HAS_BIAS:
        product += tl.load(bias + columns).to(tl.float32)[:, None]
    row = tl.arange(0, rows)
    at = out + row[None, :] * num_columns + columns[:, None]
    tl.store(at, product.to(out.dtype.element_ty), mask=row[None, :] < num_rows)
