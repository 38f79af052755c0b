"""GEMMs with weights of four bits and activations of sixteen.

Few rows: one kernel reads the packed weights once and widens them in registers; up to 16 have one of their own
(`few_rows_int4.py`). Many rows: the matrix is widened into memory, and cuBLAS multiplies it.

The form of a matrix in memory is in `int4_values.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu import few_rows_int4
from headrace.kernels.gpu.dependent_launch import dependent_launch, wait_for_inputs
from headrace.kernels.gpu.few_rows import GATED
from headrace.kernels.gpu.int4_values import PACK_LEN, pack, scale_of, values_of, weights_of, zero_points
from headrace.kernels.gpu.one_row_int4 import multiply_one_row, takes_one_row
from headrace.kernels.layout import UnnormedRows, num_rows_of
from headrace.kernels.quantized import Int4Weight

MAX_FUSED_ROWS = 256  # with more rows the matrix is widened first
_NUM_PROGRAMS = 900  # wanted: about seven on each of the 132 processors of an H200
_MANY_COLUMNS = 16_384


class Int4Linear:
    """A linear layer with weights of four bits."""

    def __init__(self, weight: Int4Weight, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._num_columns, self._width = weight.values.shape
        num_tiles = triton.cdiv(self._num_columns, _MIN_COLUMNS) * (MAX_FUSED_ROWS // _MIN_ROWS)
        self._matrix = pack(weight, num_tiles)
        self._order, self._bias, self._dtype = weight.order, bias, dtype

    def prefers_fp8(self, num_rows: int) -> bool:
        return False

    def takes_unnormed(self, x: Tensor) -> bool:
        """Whether this layer computes the norm before it as well."""
        return self._order is None and self._takes_few_rows(x.shape[0])

    def _takes_few_rows(self, num_rows: int, *, is_gated: bool = False) -> bool:
        if num_rows == 1:
            return takes_one_row(self._matrix, is_gated=is_gated)
        is_few = 1 < num_rows <= few_rows_int4.MAX_ROWS
        return is_few and few_rows_int4.can_multiply(self._matrix, is_gated=is_gated)

    def __call__(self, x: Tensor | UnnormedRows) -> Tensor:  # [T, K] -> [T, N]
        return self._multiplied(self._ordered(x))

    def gated(self, x: Tensor | UnnormedRows, activation: str) -> Tensor:  # [T, K] -> [T, N / 2]
        """Multiplies by gate and up, the halves of the matrix, and applies the activation."""
        if self._bias is not None or not self._takes_few_rows(num_rows_of(x), is_gated=True):
            return GATED[activation](self(x))
        return self._few_rows(self._ordered(x), None, activation)

    def _ordered(self, x: Tensor | UnnormedRows) -> Tensor | UnnormedRows:
        return x if self._order is None or isinstance(x, UnnormedRows) else x.index_select(1, self._order)

    def _multiplied(self, x: Tensor | UnnormedRows) -> Tensor:
        if self._takes_few_rows(num_rows_of(x)):
            return self._few_rows(x, self._bias)
        assert isinstance(x, Tensor)
        if x.shape[0] > MAX_FUSED_ROWS:
            return torch.nn.functional.linear(x, self.widened(), self._bias)
        out = torch.empty((x.shape[0], self._num_columns), dtype=self._dtype, device=x.device)
        if x.shape[0]:
            self._multiply(x.contiguous(), out)
        return out if self._bias is None else out.add_(self._bias)

    def _few_rows(self, x: Tensor | UnnormedRows, bias: Tensor | None, activation: str | None = None) -> Tensor:
        multiply = multiply_one_row if num_rows_of(x) == 1 else few_rows_int4.multiply_few_rows
        return multiply(self._matrix, x, bias, activation)

    def _multiply(self, x: Tensor, out: Tensor) -> None:
        packed, scales, has_zeros, _, groups, arrivals = self._matrix
        num_rows, num_blocks = x.shape[0], packed.shape[0]
        rows, columns, num_warps, num_stages = _tile_shape(num_rows, self._num_columns)
        tiles = (triton.cdiv(self._num_columns, columns), triton.cdiv(num_rows, rows))
        splits = _num_splits(tiles[0] * tiles[1], num_blocks)
        partial = torch.empty((splits if splits > 1 else 0, *out.shape), dtype=torch.float32, device=x.device)
        _multiply_int4[(tiles[0], splits, tiles[1])](
            x,
            packed,
            scales,
            out,
            partial,
            arrivals,
            num_rows,
            self._num_columns,
            self._width,
            triton.cdiv(num_blocks, splits),
            splits,
            ROWS=rows,
            COLUMNS=columns,
            GROUPS=groups,
            HAS_ZEROS=has_zeros,
            HAS_TAIL=self._width % PACK_LEN != 0,
            num_warps=num_warps,
            num_stages=num_stages,
            IS_INTERPRETED=triton.knobs.runtime.interpret,
            **dependent_launch(x.device),
        )

    def widened(self) -> Tensor:  # [N, K]
        """Returns the matrix in the type of the activations."""
        packed, scales, has_zeros, _, groups, _ = self._matrix
        out = torch.empty((self._num_columns, self._width), dtype=self._dtype, device=packed.device)
        columns = 32
        _widen[(triton.cdiv(self._num_columns, columns), packed.shape[0])](
            packed,
            scales,
            out,
            self._num_columns,
            self._width,
            COLUMNS=columns,
            GROUPS=groups,
            HAS_ZEROS=has_zeros,
            IS_INTERPRETED=triton.knobs.runtime.interpret,
            num_warps=4,
        )
        return out


_MIN_ROWS, _MIN_COLUMNS = 16, 64


def _tile_shape(num_rows: int, num_columns: int) -> tuple[int, int, int, int]:
    """Returns rows and columns of a tile, warps and stages."""
    if num_rows <= 16:
        return (16, 128, 4, 3) if num_columns >= _MANY_COLUMNS else (16, 64, 4, 3)
    if num_rows <= 32:
        return 32, 64, 4, 4
    return 64, 128, 8, 3


def _num_splits(num_tiles: int, num_blocks: int) -> int:
    """Splits the sums of few tiles over programs, so that the whole GPU has work; each split has some blocks."""
    wanted = min(_NUM_PROGRAMS // num_tiles, num_blocks // 4)
    return next((splits for splits in (16, 8, 4, 2) if splits <= wanted), 1)


@triton.jit(do_not_specialize=["num_rows", "blocks_per_split", "num_splits"])
def _multiply_int4(
    x,  # [T, width]
    packed,
    scales,
    out,  # [T, num_columns]
    partial,  # [num_splits, T, num_columns] float32
    arrivals,  # one per tile, zero before and after
    num_rows,
    num_columns,
    width,
    blocks_per_split,
    num_splits,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,  # of 128 weights: 1, 2 or 4
    HAS_ZEROS: tl.constexpr,
    HAS_TAIL: tl.constexpr,  # the last block has fewer weights
    IS_DEPENDENT: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Computes a tile transposed, [COLUMNS, ROWS]: the weights are the left operand, which may come from registers."""
    wait_for_inputs(IS_DEPENDENT)
    tile, split = tl.program_id(0), tl.program_id(1)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    DEPTH: tl.constexpr = 128 // GROUPS
    depths = tl.arange(0, DEPTH)
    is_row = rows[None, :] < num_rows
    x_at = x + rows[None, :].to(tl.int64) * width + depths[:, None]
    words_at = packed + columns[:, None] * 16 + tl.arange(0, 16)[None, :]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    first = split * blocks_per_split
    for block in tl.range(first, tl.minimum(first + blocks_per_split, tl.cdiv(width, 128))):
        words = tl.load(words_at + tl.cast(block, tl.int64) * (num_columns * 16), mask=inside[:, None], other=0)
        for part in tl.static_range(GROUPS):
            group = tl.cast(block * GROUPS + part, tl.int64) * num_columns + columns
            scale = tl.load(scales + group, mask=inside, other=0.0)
            zero = zero_points(scale, x, HAS_ZEROS, IS_INTERPRETED)
            if HAS_ZEROS:
                scale = scale_of(scale)
            depth = block * 128 + part * DEPTH
            is_inside = is_row
            if HAS_TAIL:
                is_inside = is_row & (depth + depths[:, None] < width)
            row = tl.load(x_at + depth, mask=is_inside, other=0.0)
            weight = weights_of(words, zero, part * (4 // GROUPS), 4 // GROUPS, x, IS_INTERPRETED)
            total += tl.dot(weight, row) * scale[:, None]
    at = rows[None, :].to(tl.int64) * num_columns + columns[:, None]
    is_inside = is_row & inside[:, None]
    if num_splits > 1:
        size = tl.cast(num_rows, tl.int64) * num_columns
        tl.store(partial + split * size + at, total, mask=is_inside)
        tl.debug_barrier()  # the whole program has stored its sums before it counts as arrived
        arrival = arrivals + tl.program_id(2) * tl.num_programs(0) + tile
        if tl.atomic_add(arrival, 1, sem="acq_rel") < num_splits - 1:
            return
        tl.store(arrival, 0)  # the next kernel expects zeros
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        for other in range(num_splits):  # always in this order, so that results repeat exactly
            total += tl.load(partial + other * size + at, mask=is_inside, other=0.0, cache_modifier=".cg")
    tl.store(out + at, total.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _widen(
    packed,
    scales,
    out,  # [num_columns, width]
    num_columns,
    width,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    block = tl.program_id(1).to(tl.int64)
    inside = columns < num_columns
    depths = tl.arange(0, 32)
    at = packed + block * (num_columns * 16) + columns[:, None] * 16 + tl.arange(0, 16)[None, :]
    words = tl.load(at, mask=inside[:, None], other=0)
    for index in tl.static_range(4):
        group = (block * GROUPS + index * GROUPS // 4) * num_columns + columns
        scale = tl.load(scales + group, mask=inside, other=0.0)
        zero = zero_points(scale, out, HAS_ZEROS, IS_INTERPRETED)
        if HAS_ZEROS:
            scale = scale_of(scale)
        weight = values_of(words, zero, index, out, IS_INTERPRETED).to(tl.float32) * scale[:, None]
        depth = block * 128 + index * 32 + depths[None, :]
        where = out + columns[:, None].to(tl.int64) * width + depth
        tl.store(where, weight.to(out.dtype.element_ty), mask=inside[:, None] & (depth < width))
