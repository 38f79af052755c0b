"""Linear layers of a step with few tokens, where weights are read as fast as memory allows and little is computed.

    one row            `_multiply_row`: each program multiplies a few rows of the weight by x without tensor cores. The
                       RMS norm before it and the gated activation after it are part of it. Its first weights are
                       loaded before the kernel before it has ended (`dependent_launch`).
    2 to 16 rows       `_multiply_rows`: on tensor cores, with the gated activation after it
    more               left to the class of the layer, as is a large head with more than one row

Weights are in the type of the activations, or in eight bits with scales. Eight bits are not widened for tensor cores,
which would take longer than to load them: `split_rows` makes two parts of eight bits of each row instead, which are
multiplied as rows of their own, and whose sum is nearly as exact as the row.

Launch parameters: the best of sweeps on an H200 (`benchmarks/layer_time.py`), 2026-11-17, over shapes of 1B and 8B
models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.activation import gelu_tanh_and_mul, silu_and_mul
from headrace.kernels.gpu.dependent_launch import (
    dependent_launch,
    let_next_start,
    wait_for_inputs,
    wait_for_kernels_before,
)
from headrace.kernels.gpu.shared_memory import fitting_stages
from headrace.kernels.layout import Fp8Rows, Rows, UnnormedRows

MAX_ROWS = 16
MIN_DEPTH = 128  # of a tile
_ROWS_BLOCK = 16  # the smallest side of a tensor core product
ACTIVATIONS = {None: 0, "silu": 1, "gelu_tanh": 2}
_LARGE = 1 << 26  # elements of a weight, such as the head's; the loads of larger ones are pipelined
_WIDE = 8192
_MANY_COLUMNS = 1024
_TILE_COLUMNS = 64  # of few rows: tensor cores take 64 rows of the weight
_MANY_TILES = 64
_MIN_STAGES = 2
_UNSCALED = 0  # the scales of a weight
PER_COLUMN: tl.constexpr = tl.constexpr(1)
PER_BLOCK: tl.constexpr = tl.constexpr(2)  # of 128 x 128 weights
_SCALED_LEN: tl.constexpr = tl.constexpr(128)


@dataclass(frozen=True, slots=True)
class FewRowsLinear:
    """A linear layer that multiplies few rows by the kernels of this file, and more in its own way."""

    weight: Tensor  # [N, K] in the type of the activations, or in eight bits with scales
    bias: Tensor | None  # [N]
    scales: Tensor | None = None  # float32, [N, 1], or of blocks of 128 x 128 weights [ceil(N / 128), ceil(K / 128)]
    arrivals: Tensor | None = None  # [tiles] int32, zeros before and after a kernel; None: allocated per call

    def prefers_fp8(self, num_rows: int) -> bool:
        return False

    def takes_unnormed(self, x: Tensor) -> bool:
        """Whether this layer computes the norm before it as well."""
        return x.shape[0] == 1 and self._is_fast

    def takes_few_rows(self, num_rows: int) -> bool:
        """Whether the kernels of this file multiply so many."""
        return self._is_fast if num_rows == 1 else 1 < num_rows <= MAX_ROWS and self._has_whole_tiles

    @property
    def _is_fast(self) -> bool:
        """Whether the kernels of this file take the layer: whole tiles, 16 bytes to a load."""
        num_columns, width = self.weight.shape
        return num_columns % 16 == 0 and width % MIN_DEPTH == 0 and self.weight.is_contiguous()

    @property
    def _has_whole_tiles(self) -> bool:
        num_columns = self.weight.shape[0]
        is_small = self.weight.numel() <= _LARGE or self.scales is not None
        return self._is_fast and num_columns % _TILE_COLUMNS == 0 and is_small

    def __call__(self, x: Rows) -> Tensor:  # [T, K] -> [T, N]
        if isinstance(x, UnnormedRows):
            return self._one_row(x.x, x)
        if isinstance(x, Tensor) and self.takes_few_rows(x.shape[0]):
            return self._one_row(x) if x.shape[0] == 1 else self._few_rows(x)
        return self._many_rows(x)

    def _many_rows(self, x: Tensor | Fp8Rows) -> Tensor:
        raise NotImplementedError

    def gated(self, x: Tensor | UnnormedRows, activation: str) -> Tensor:  # [T, K] -> [T, N / 2]
        """Multiplies by gate and up, the halves of the weight, and applies the activation."""
        is_fast = self._is_fast and self.bias is None and self.weight.shape[0] % (2 * _TILE_COLUMNS) == 0
        if isinstance(x, UnnormedRows):
            return self._one_row(x.x, x, activation) if is_fast else GATED[activation](self._one_row(x.x, x))
        if x.shape[0] == 1 and is_fast:
            return self._one_row(x, None, activation)
        if 1 < x.shape[0] <= MAX_ROWS and is_fast:
            return self._few_rows(x, activation)
        return GATED[activation](self(x))

    def _one_row(self, x: Tensor, norm: UnnormedRows | None = None, activation: str | None = None) -> Tensor:
        num_columns, width = self.weight.shape
        num_columns //= 1 if activation is None else 2
        tile = _row_tile(
            num_columns, width, self.weight.element_size(), has_norm=norm is not None, is_gated=activation is not None
        )
        assert tile.stages == 1 or norm is None or norm.normed is None
        out = torch.empty((1, num_columns), dtype=x.dtype, device=x.device)
        residual = None if norm is None else norm.residual
        _multiply_row[(num_columns // tile.columns,)](
            x,
            x if residual is None else residual,
            x if norm is None else norm.weight,
            x if norm is None or norm.total is None else norm.total,
            x if norm is None or norm.normed is None else norm.normed,
            self.weight,
            self.weight if self.scales is None else self.scales,
            x if self.bias is None else self.bias,
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
            SCALING=self._scaling,
            HAS_BIAS=self.bias is not None,
            ACTIVATION=ACTIVATIONS[activation],
            num_warps=tile.num_warps,
            **dependent_launch(x.device),
        )
        return out

    def _few_rows(self, x: Tensor, activation: str | None = None) -> Tensor:
        width, num_matrices = self.weight.shape[1], 1 if activation is None else 2
        num_columns = self.weight.shape[0] // num_matrices
        out = torch.empty((x.shape[0], num_columns), dtype=x.dtype, device=x.device)
        tile = _few_rows_tile(num_columns, width, self._scaling, is_gated=activation is not None)
        stage_bytes = num_matrices * _TILE_COLUMNS * tile.depth * self.weight.element_size()
        stage_bytes += _ROWS_BLOCK * tile.depth * x.element_size()
        # What is loaded before the wait takes the shared memory of a stage; where that is scarce, nothing is.
        room = fitting_stages(tile.stages + bool(tile.first_depth), stage_bytes, x.device)
        first_depth = tile.first_depth if room > _MIN_STAGES else 0
        partial, arrivals = out, out
        if tile.splits > 1:
            partial = torch.empty((tile.splits, *out.shape), dtype=torch.float32, device=x.device)
            arrivals = new_arrivals(self.weight) if self.arrivals is None else self.arrivals
        rows, units = (x.contiguous(), x) if self.scales is None else split_rows(x, self.weight.dtype)
        _multiply_rows[(num_columns // _TILE_COLUMNS, tile.splits)](
            rows,
            units,
            self.weight,
            self.weight if self.scales is None else self.scales,
            x if self.bias is None else self.bias,
            out,
            partial,
            arrivals,
            x.shape[0],
            num_columns,
            WIDTH=width,
            ROWS=_ROWS_BLOCK,
            COLUMNS=_TILE_COLUMNS,
            DEPTH=tile.depth,
            FIRST_DEPTH=first_depth,
            SPLITS=tile.splits,
            STAGES=room - bool(first_depth),
            SCALING=self._scaling,
            HAS_BIAS=self.bias is not None,
            ACTIVATION=ACTIVATIONS[activation],
            num_warps=4,
            **dependent_launch(x.device),
        )
        return out

    @property
    def _scaling(self) -> int:
        if self.scales is None:
            return _UNSCALED
        return int((PER_COLUMN if self.scales.shape[0] == self.weight.shape[0] else PER_BLOCK).value)


@dataclass(frozen=True, slots=True)
class Linear(FewRowsLinear):
    """A linear layer with weights in the type of the activations. Many rows are multiplied by the library."""

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return cls(weight, bias, arrivals=new_arrivals(weight))

    def _many_rows(self, x: Tensor | Fp8Rows) -> Tensor:
        assert isinstance(x, Tensor)
        return F.linear(x, self.weight, self.bias)


GATED = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}


class RowTile(NamedTuple):
    columns: int  # rows of the weight, which are columns of the output
    depth: int
    num_warps: int
    stages: int  # of the loop over the depth; 1: the next tile is loaded by hand, the first before the wait


def _row_tile(num_columns: int, width: int, element_size: int, *, has_norm: bool, is_gated: bool) -> RowTile:
    """The best in graphs of whole decode layers: what is best in a chain of GEMMs is not best between other kernels."""
    if num_columns * width > _LARGE:
        return RowTile(16, tile_depth(width, 512), 4, 3)
    if element_size == 1:
        return RowTile(4, tile_depth(width, 2048), 8, 1) if is_gated else RowTile(8, _narrow_depth(width), 4, 1)
    if is_gated:
        depth = tile_depth(width, 4096)
        return RowTile(2 if depth > 1024 else 4, depth, 4, 1)
    if width > _WIDE or (has_norm and num_columns >= _MANY_COLUMNS):
        return RowTile(8, tile_depth(width, 1024), 4, 1)
    return RowTile(4, tile_depth(width, 2048), 4, 1)


def _narrow_depth(width: int) -> int:
    return tile_depth(width, 1024 if width > _WIDE else 2048)


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
    scales,
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
    SCALING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Computes COLUMNS elements of the product of one row; with an activation, of both halves of the weight. The first
    program also stores the normed row, if it is wanted."""
    let_next_start(IS_DEPENDENT)
    first_column = tl.program_id(0) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
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
            sums += first.to(tl.float32) * _scaled_part(row, scales, first_column, depth + depths, WIDTH, SCALING)
            if ACTIVATION:
                up_row = _scaled_part(row, scales, num_columns + first_column, depth + depths, WIDTH, SCALING)
                up_sums += second.to(tl.float32) * up_row
            if depth + DEPTH < WIDTH:
                first = next_first
                if ACTIVATION:
                    second = next_second
    else:
        for depth in tl.range(0, WIDTH, DEPTH, num_stages=STAGES):
            row = _normed_part(x, residual, gain, norm, depth + depths, HAS_NORM, HAS_RESIDUAL)
            first_row = _scaled_part(row, scales, first_column, depth + depths, WIDTH, SCALING)
            sums += tl.load(first_at + depth).to(tl.float32) * first_row
            if ACTIVATION:
                up_row = _scaled_part(row, scales, num_columns + first_column, depth + depths, WIDTH, SCALING)
                up_sums += tl.load(second_at + depth).to(tl.float32) * up_row
    product = tl.sum(sums, axis=1)
    if SCALING == PER_COLUMN:
        product *= tl.load(scales + columns)
    if HAS_BIAS:
        product += tl.load(bias + columns).to(tl.float32)
    if ACTIVATION:
        up = tl.sum(up_sums, axis=1)
        if SCALING == PER_COLUMN:
            up *= tl.load(scales + num_columns + columns)
        product = gate(product, up, out, ACTIVATION)
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


@triton.jit
def _scaled_part(row, scales, first_column, depths, WIDTH: tl.constexpr, SCALING: tl.constexpr):
    """Multiplies a part of the row by the scales of the blocks of weights from `first_column` on, all in one block."""
    if SCALING == PER_BLOCK:
        blocks: tl.constexpr = (WIDTH + _SCALED_LEN - 1) // _SCALED_LEN
        row *= tl.load(scales + first_column // _SCALED_LEN * blocks + depths // _SCALED_LEN)
    return row[None, :]


@triton.jit
def gate(gate_sums, up_sums, out, ACTIVATION: tl.constexpr):
    """Applies the activation to the gate and multiplies by up, with the roundings of the reference."""
    element = out.dtype.element_ty
    bend = gate_sums.to(element).to(tl.float32)
    gated = bend
    if ACTIVATION == 2:
        bend = 1.5957691216057308 * (gated + 0.044715 * gated * gated * gated)
    return (gated * tl.sigmoid(bend)).to(element) * up_sums.to(element)


class FewRowsTile(NamedTuple):
    depth: int
    first_depth: int  # of the part of the weight that is loaded before the wait; 0: none
    stages: int
    splits: int  # programs that share the depth of a tile


def _few_rows_tile(num_columns: int, width: int, scaling: int, *, is_gated: bool) -> FewRowsTile:
    """The best of a sweep over graphs of whole decode layers of 4 and 16 rows on an H200, 2026-11-17."""
    if is_gated:
        return FewRowsTile(MIN_DEPTH, MIN_DEPTH if width > MIN_DEPTH else 0, 3, 1)
    has_wide_tiles = scaling == PER_COLUMN.value and width % (2 * 2 * MIN_DEPTH) == 0  # eight bits
    depth, stages = (2 * MIN_DEPTH, 5) if has_wide_tiles else (MIN_DEPTH, 4)
    many_tiles = _MANY_TILES if scaling == _UNSCALED else _MANY_TILES - 16
    wanted = 4 if num_columns <= many_tiles * _TILE_COLUMNS else 2
    splits = next(splits for splits in (4, 2, 1) if splits <= wanted and width % (splits * depth) == 0)
    return FewRowsTile(depth, 0, stages, splits)


def new_arrivals(weight: Tensor) -> Tensor:
    return torch.zeros(triton.cdiv(weight.shape[0], _TILE_COLUMNS), dtype=torch.int32, device=weight.device)


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_rows(
    x,
    units,
    weight,
    scales,
    bias,
    out,
    partial,
    arrivals,
    num_rows,
    num_columns,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    FIRST_DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    SCALING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Computes COLUMNS columns of all rows; with an activation, of both halves of the weight. The weight is the left
    operand: tensor cores take 64 rows of it."""
    let_next_start(IS_DEPENDENT)
    first_column = tl.program_id(0) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    rows = tl.arange(0, ROWS)
    PARTS: tl.constexpr = 2 if SCALING else 1  # of the rows
    lines_of_rows = tl.arange(0, PARTS * ROWS)
    inside = (lines_of_rows % ROWS)[:, None] < num_rows
    LENGTH: tl.constexpr = WIDTH // SPLITS  # of this program's part of the depth
    begin = tl.program_id(1) * LENGTH
    lines = weight + columns[:, None].to(tl.int64) * WIDTH + begin
    up_lines = lines + num_columns.to(tl.int64) * WIDTH  # of the gate is up
    row_lines = x + (lines_of_rows // ROWS * num_rows + lines_of_rows % ROWS)[:, None] * WIDTH + begin
    if FIRST_DEPTH:
        firsts = tl.arange(0, FIRST_DEPTH)[None, :]
        first = tl.load(lines + firsts)
        if ACTIVATION:
            first_up = tl.load(up_lines + firsts)
    wait_for_kernels_before(IS_DEPENDENT)
    SUM: tl.constexpr = tl.int32 if weight.dtype.element_ty == tl.int8 else tl.float32
    ZERO: tl.constexpr = 0 if weight.dtype.element_ty == tl.int8 else 0.0
    sums = tl.zeros([COLUMNS, PARTS * ROWS], SUM)
    up_sums = tl.zeros([COLUMNS, PARTS * ROWS], SUM)
    if FIRST_DEPTH:
        row = tl.trans(tl.load(row_lines + firsts, mask=inside, other=ZERO))
        sums = _add_dot(sums, first, row, scales, first_column, begin, WIDTH, SCALING)
        if ACTIVATION:
            up_sums = _add_dot(up_sums, first_up, row, scales, num_columns + first_column, begin, WIDTH, SCALING)
    depths = tl.arange(0, DEPTH)[None, :]
    for depth in tl.range(FIRST_DEPTH, LENGTH, DEPTH, num_stages=STAGES):
        row = tl.trans(tl.load(row_lines + depth + depths, mask=inside, other=ZERO))
        tile = tl.load(lines + depth + depths)
        sums = _add_dot(sums, tile, row, scales, first_column, begin + depth, WIDTH, SCALING)
        if ACTIVATION:
            up_tile = tl.load(up_lines + depth + depths)
            up_sums = _add_dot(up_sums, up_tile, row, scales, num_columns + first_column, begin + depth, WIDTH, SCALING)
    at = rows[None, :] * num_columns + columns[:, None]
    is_row = rows[None, :] < num_rows
    if SCALING:
        unit = tl.load(units + rows, mask=rows < num_rows, other=0.0)
        sums = _summed(sums, unit, COLUMNS, ROWS)
        if ACTIVATION:
            up_sums = _summed(up_sums, unit, COLUMNS, ROWS)
    if SPLITS > 1:
        size = num_rows * num_columns
        tl.store(partial + tl.program_id(1) * size + at, sums, mask=is_row)
        tl.debug_barrier()  # the whole program has stored its sums before it counts as arrived
        arrival = arrivals + tl.program_id(0)
        if tl.atomic_add(arrival, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(arrival, 0)  # the next kernel expects zeros
        sums = tl.zeros([COLUMNS, ROWS], tl.float32)
        for split in tl.static_range(SPLITS):  # always in this order, so that results repeat exactly
            sums += tl.load(partial + split * size + at, mask=is_row, other=0.0, cache_modifier=".cg")
    if SCALING == PER_COLUMN:
        sums *= tl.load(scales + columns)[:, None]
        if ACTIVATION:
            up_sums *= tl.load(scales + num_columns + columns)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + columns).to(tl.float32)[:, None]
    if ACTIVATION:
        sums = gate(sums, up_sums, out, ACTIVATION).to(tl.float32)
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def _add_dot(sums, tile, row, scales, first_column, depth, WIDTH: tl.constexpr, SCALING: tl.constexpr):
    """Adds a tile of the weight times a tile of the rows; a tile has one scale, if blocks have."""
    if SCALING == PER_BLOCK:
        blocks: tl.constexpr = (WIDTH + _SCALED_LEN - 1) // _SCALED_LEN
        scale = tl.load(scales + first_column // _SCALED_LEN * blocks + depth // _SCALED_LEN)
        return sums + tl.dot(tile, row) * scale
    elif tile.dtype == tl.int8:
        return tl.dot(tile, row, sums, out_dtype=tl.int32)
    else:
        return tl.dot(tile, row, sums, input_precision="ieee")


@triton.jit
def _summed(sums, units, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Adds up the parts of the rows, [COLUMNS, 2 * ROWS] -> [COLUMNS, ROWS]."""
    high, low = tl.split(tl.permute(tl.reshape(sums, [COLUMNS, 2, ROWS]), (0, 2, 1)))
    if sums.dtype == tl.int32:
        return (high * 256 + low).to(tl.float32) * units[None, :]
    else:
        return (high + low) * units[None, :]


def split_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # [T, K] -> [2, T, K], [T] float32
    """Returns rows as two parts of eight bits, and their units. Each row is (high + low) * unit, or of integers
    (256 * high + low) * unit: as exact as bfloat16."""
    parts = torch.empty((2, *x.shape), dtype=dtype, device=x.device)
    units = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    _split_rows[(x.shape[0],)](
        x,
        parts,
        units,
        x.stride(0),
        x.numel(),
        WIDTH=x.shape[1],
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **dependent_launch(x.device),
    )
    return parts, units


@triton.jit(do_not_specialize=["size"])
def _split_rows(x, parts, units, stride, size, WIDTH: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    wait_for_inputs(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    wide = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(wide), axis=0), 1e-30)
    at = parts + row * WIDTH + columns
    if parts.dtype.element_ty == tl.int8:
        unit = largest / 32512.0  # 127 * 256
        whole = (wide * (1.0 / unit) + 12582912.0).to(tl.int32, bitcast=True)  # 1.5 * 2**23: the sum has no fraction
        tl.store(at, ((whole + 128) >> 8).to(tl.int8), mask=inside)
        tl.store(at + size, whole.to(tl.int8), mask=inside)  # the last eight bits
    else:
        unit = largest / 448.0
        wide *= 1.0 / unit
        high = wide.to(parts.dtype.element_ty)
        tl.store(at, high, mask=inside)
        tl.store(at + size, (wide - high.to(tl.float32)).to(parts.dtype.element_ty), mask=inside)
    tl.store(units + row, unit)
