"""Rows of activations as two parts of eight bits, for tensor cores that multiply them by weights of eight or four bits.

Widening weights in a GEMM of few rows takes longer than loading them. Activations are few, so they are converted, once
per GEMM: the row is (high + low) * unit, of integers (256 * high + low) * unit. The parts are rows of their own in the
GEMM, whose sums are added up. FP8 parts have eight digits together, as bfloat16 has; integers have 15 bits of the
largest value of the row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.dependent_launch import dependent_launch, wait_for_inputs
from headrace.kernels.layout import UnnormedRows

_BLOCK_LEN = 128
_MAX_ROWS = 16


class RowParts(NamedTuple):
    values: Tensor  # [2, T, K], high and low
    units: Tensor  # [T] float32
    block_sums: Tensor  # [K / 128, 16] float32, sums of 128 columns in units, for zero points of weights; else empty


def split_rows(
    rows: Tensor | UnnormedRows, dtype: torch.dtype, *, for_int4: bool = False, adds_blocks: bool = False
) -> RowParts:  # [T, K]
    """Splits rows, after their RMS norm if that is left to the layer. For weights of four bits each 128 columns come in
    the order in which a kernel widens the weights of a packed block (`few_rows_int4.py`); `adds_blocks`: and their sums
    are returned."""
    norm = rows if isinstance(rows, UnnormedRows) else None
    x = rows.x if isinstance(rows, UnnormedRows) else rows
    assert norm is None or norm.normed is None
    residual = None if norm is None else norm.residual
    num_rows, width = x.shape
    parts = torch.empty((2, num_rows, width), dtype=dtype, device=x.device)
    units = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    num_blocks = width // _BLOCK_LEN if adds_blocks else 0
    block_sums = torch.empty((num_blocks, _MAX_ROWS), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _split_rows[(num_rows,)](
        x,
        x if residual is None else residual,
        x if norm is None else norm.weight,
        x if norm is None or norm.total is None else norm.total,
        parts,
        units,
        block_sums,
        x.stride(0),
        x.numel(),
        0.0 if norm is None else norm.eps,
        WIDTH=width,
        BLOCK=block,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        FOR_INT4=for_int4,
        ADDS_BLOCKS=adds_blocks,
        num_warps=min(16, max(1, block // 512)),
        **dependent_launch(x.device),
    )
    return RowParts(parts, units, block_sums)


@triton.jit(do_not_specialize=["size"])
def _split_rows(
    x,
    residual,
    gain,
    total,
    parts,
    units,
    block_sums,
    stride,
    size,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    FOR_INT4: tl.constexpr,
    ADDS_BLOCKS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_inputs(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    inside = places < WIDTH
    line = tl.load(x + row * stride + places, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        # Rounded to the type of the residual stream before it is normed, as in the reference.
        line = line.to(tl.float32) + tl.load(residual + row * WIDTH + places, mask=inside, other=0.0).to(tl.float32)
        line = line.to(x.dtype.element_ty)
        tl.store(total + row * WIDTH + places, line, mask=inside)
    wide = line.to(tl.float32)
    if HAS_NORM:
        wide *= tl.rsqrt(tl.sum(wide * wide) / WIDTH + eps)
        wide = (wide * tl.load(gain + places, mask=inside, other=0.0)).to(x.dtype.element_ty).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(wide), axis=0), 1e-30)
    at = parts + row * WIDTH + places
    if parts.dtype.element_ty == tl.int8:
        unit = largest / 32512.0  # 127 * 256
        shifted = wide * (1.0 / unit) + 12582912.0  # 1.5 * 2**23: the sum has no fraction
        whole = shifted.to(tl.int32, bitcast=True)
        high, low = ((whole + 128) >> 8).to(tl.int8), whole.to(tl.int8)  # the last eight bits
        if FOR_INT4:
            high, low = _ordered(high, BLOCK), _ordered(low, BLOCK)
        tl.store(at, high, mask=inside)
        tl.store(at + size, low, mask=inside)
        if ADDS_BLOCKS:
            sums = tl.sum(tl.reshape(shifted - 12582912.0, [BLOCK // 128, 128]), axis=1)
            blocks = tl.arange(0, BLOCK // 128)
            tl.store(block_sums + blocks * 16 + row, sums, mask=blocks < WIDTH // 128)
    else:
        unit = largest / 448.0
        wide *= 1.0 / unit
        high = wide.to(parts.dtype.element_ty)
        tl.store(at, high, mask=inside)
        tl.store(at + size, (wide - high.to(tl.float32)).to(parts.dtype.element_ty), mask=inside)
    tl.store(units + row, unit)


@triton.jit
def _ordered(values, BLOCK: tl.constexpr):
    """Brings each 128 values into the order of the packed weights: those in the low halves of all bytes come first."""
    # 0 block, 1 weight / 64, 2 half of the byte, 3 word, 4 half of the word
    values = tl.reshape(values, [BLOCK // 128, 2, 2, 16, 2])
    return tl.reshape(tl.permute(values, (0, 2, 3, 4, 1)), [BLOCK])


@triton.jit
def sum_of_parts(sums, FACTOR: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Adds up the sums of both parts, [COLUMNS, 2 * ROWS] -> [COLUMNS, ROWS] float32, in units. `FACTOR` of the high
    part: 256 of integers, else 1."""
    high, low = tl.split(tl.permute(tl.reshape(sums, [COLUMNS, 2, ROWS]), (0, 2, 1)))
    return (high * FACTOR + low).to(tl.float32)
