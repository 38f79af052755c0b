"""GEMMs of eight-bit weights and eight-bit activations whose scales `torch._scaled_mm` does not take.

    INT8          one scale per row of activations and per output channel; sums in int32, exact
    FP8, blocks   one scale per 128 columns of a row of activations, and per 128 x 128 weights; the scales of each 128
                  columns are applied to their sum, in float32

One kernel for both: it differs in where the scales are applied. Activations are quantized here, before the GEMM;
up to 16 rows have other kernels (`few_rows.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.few_rows import FewRowsLinear, new_arrivals
from headrace.kernels.layout import Fp8Rows
from headrace.kernels.quantized import BLOCK_LEN, FP8, Fp8Weight, Int8Weight

_TILES_TOGETHER = 8  # row tiles whose programs run side by side and share weight tiles in the L2 cache


@dataclass(frozen=True, slots=True)
class ScaledLinear(FewRowsLinear):
    """A linear layer with INT8 weights, or FP8 weights with scales per block. Up to 16 rows are not rounded to them."""

    dtype: torch.dtype = torch.bfloat16  # of the output

    @classmethod
    def of(cls, weight: Int8Weight | Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> ScaledLinear:
        values = weight.values.contiguous()
        return cls(values, bias, weight.scales.contiguous(), new_arrivals(values), dtype)

    def _many_rows(self, x: Tensor | Fp8Rows) -> Tensor:
        assert isinstance(x, Tensor) and self.scales is not None
        is_int8 = self.weight.dtype == torch.int8
        num_rows, width = x.shape
        num_columns = self.weight.shape[0]
        out = torch.empty((num_rows, num_columns), dtype=self.dtype, device=x.device)
        if num_rows == 0:
            return out
        values, scales = quantize_rows_int8(x) if is_int8 else quantize_groups_fp8(x)
        rows, columns, num_warps, num_stages = _tile_shape(num_rows)
        num_tiles = triton.cdiv(num_rows, rows)
        _multiply_scaled[(num_tiles * triton.cdiv(num_columns, columns),)](
            values,
            scales,
            self.weight,
            self.scales,
            out,
            num_rows,
            num_tiles,
            NUM_COLUMNS=num_columns,
            WIDTH=width,
            ROWS=rows,
            COLUMNS=columns,
            DEPTH=BLOCK_LEN,
            TOGETHER=_TILES_TOGETHER,
            IS_INT8=is_int8,
            num_warps=num_warps,
            num_stages=num_stages,
        )
        return out if self.bias is None else out.add_(self.bias)


def _tile_shape(num_rows: int) -> tuple[int, int, int, int]:
    """Returns rows and columns of a tile, warps and stages. Not swept on a GPU yet."""
    for rows in (16, 32, 64):
        if num_rows <= rows:
            return rows, 64, 4, 4
    return 128, 128, 8, 3


def quantize_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:  # [T, K] -> int8, [T, 1] float32
    """Quantizes each row with its own scale."""
    num_rows, width = x.shape
    values = torch.empty((num_rows, width), dtype=torch.int8, device=x.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _quantize_int8[(num_rows,)](
        x, values, scales, width, x.stride(0), BLOCK=block, num_warps=min(16, max(1, block // 1024))
    )
    return values, scales


def quantize_groups_fp8(x: Tensor) -> tuple[Tensor, Tensor]:  # [T, K] -> float8, [T, ceil(K / 128)] float32
    """Quantizes each 128 columns of a row with their own scale."""
    num_rows, width = x.shape
    num_groups = triton.cdiv(width, BLOCK_LEN)
    values = torch.empty((num_rows, width), dtype=FP8, device=x.device)
    scales = torch.empty((num_rows, num_groups), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(num_groups)
    _quantize_groups[(num_rows,)](
        x,
        values,
        scales,
        width,
        x.stride(0),
        num_groups,
        GROUPS=block,
        GROUP_LEN=BLOCK_LEN,
        num_warps=min(16, max(1, block // 8)),
    )
    return values, scales


@triton.jit
def _quantize_int8(x, out, scales, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    line = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(line), axis=0), 1e-12) / 127.0
    tl.store(scales + row, scale)
    rounded = (line / scale + 12582912.0) - 12582912.0  # 1.5 * 2**23: the sum has no digits after the point
    tl.store(out + row * width + columns, rounded.to(tl.int8), mask=inside)


@triton.jit
def _quantize_groups(x, out, scales, width, stride, num_groups, GROUPS: tl.constexpr, GROUP_LEN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP_LEN + tl.arange(0, GROUP_LEN)[None, :]
    inside = columns < width
    line = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(line), axis=1), 1e-12) / 448.0
    tl.store(scales + row * num_groups + groups, scale, mask=groups < num_groups)
    tl.store(out + row * width + columns, (line / scale[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _multiply_scaled(
    x,  # [T, WIDTH]
    x_scales,  # [T, 1], or [T, ceil(WIDTH / DEPTH)]
    weight,  # [NUM_COLUMNS, WIDTH]
    weight_scales,  # [NUM_COLUMNS, 1], or [ceil(NUM_COLUMNS / DEPTH), ceil(WIDTH / DEPTH)]
    out,  # [T, NUM_COLUMNS]
    num_rows,
    num_tiles,
    NUM_COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    IS_INT8: tl.constexpr,
):
    together = TOGETHER * tl.cdiv(NUM_COLUMNS, COLUMNS)
    first_tile = tl.program_id(0) // together * TOGETHER
    num_together = tl.minimum(num_tiles - first_tile, TOGETHER)
    tile = first_tile + tl.program_id(0) % together % num_together
    rows = tile * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) % together // num_together * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < num_rows, columns < NUM_COLUMNS
    some_rows = tl.where(is_row, rows, 0).to(tl.int64)  # results of the others are not stored
    some_columns = tl.where(is_column, columns, 0).to(tl.int64)
    depths = tl.arange(0, DEPTH)
    x_at = x + some_rows[:, None] * WIDTH + depths[None, :]
    weight_at = weight + some_columns[:, None] * WIDTH + depths[None, :]
    num_blocks: tl.constexpr = (WIDTH + DEPTH - 1) // DEPTH
    if IS_INT8:
        total = tl.zeros([ROWS, COLUMNS], tl.int32)
    else:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in tl.range(0, num_blocks):
        if WIDTH % DEPTH == 0:
            row = tl.load(x_at + block * DEPTH)
            matrix = tl.load(weight_at + block * DEPTH)
        else:
            is_inside = block * DEPTH + depths[None, :] < WIDTH
            row = tl.load(x_at + block * DEPTH, mask=is_inside, other=0.0)
            matrix = tl.load(weight_at + block * DEPTH, mask=is_inside, other=0.0)
        if IS_INT8:
            total = tl.dot(row, tl.trans(matrix), total, out_dtype=tl.int32)
        else:
            row_scale = tl.load(x_scales + some_rows * num_blocks + block)
            block_scale = tl.load(weight_scales + some_columns // DEPTH * num_blocks + block)
            total += tl.dot(row, tl.trans(matrix)) * row_scale[:, None] * block_scale[None, :]
    if IS_INT8:
        sums = total.to(tl.float32) * tl.load(x_scales + some_rows)[:, None]
        sums = sums * tl.load(weight_scales + some_columns)[None, :]
    else:
        sums = total
    at = out + some_rows[:, None] * NUM_COLUMNS + columns[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
