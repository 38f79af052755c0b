"""Linear layers of a step with few tokens, where weights are read as fast as memory allows and little is computed.

    one row        in the type of the weights: without tensor cores, with the RMS norm before it and the gated
                   activation after it (`one_row.py`)
    up to 16 rows  `_multiply_rows`: on tensor cores, with the gated activation after it
    more           left to the class of the layer, as is a large head with more than one row

Weights are in the type of the activations, or in eight bits with scales. Eight bits are not widened for tensor cores,
which would take longer than to load them: rows are split into two parts of eight bits instead (`row_parts.py`), after
the RMS norm before them.

Launch parameters: the best of sweeps on an H200 (`benchmarks/layer_time.py`), 2026-11-17, over shapes of 1B and 8B
models, those of eight bits over an 8B.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.activation import ACTIVATIONS, gate, gelu_tanh_and_mul, silu_and_mul
from headrace.kernels.gpu.dependent_launch import dependent_launch, let_next_start, wait_for_kernels_before
from headrace.kernels.gpu.one_row import LARGE, MIN_DEPTH, multiply_one_row
from headrace.kernels.gpu.row_parts import split_rows, sum_of_parts
from headrace.kernels.gpu.shared_memory import fitting_stages
from headrace.kernels.layout import Fp8Rows, Rows, UnnormedRows, num_rows_of

MAX_ROWS = 16
_ROWS_BLOCK = 16  # the smallest side of a tensor core product
_TILE_COLUMNS = 64  # tensor cores take 64 rows of the weight
_MANY_TILES, _MANY_TILES_OF_8_BITS, _TILES_OF_HEADS = 64, 48, 512
_MIN_STAGES = 2
UNSCALED = 0  # how a weight is scaled
PER_COLUMN: tl.constexpr = tl.constexpr(1)
PER_BLOCK: tl.constexpr = tl.constexpr(2)
SCALED_LEN: tl.constexpr = tl.constexpr(128)  # of a block


@dataclass(frozen=True, slots=True)
class FewRowsLinear(ABC):
    """A linear layer that multiplies few rows by the kernels of this file, and more in its own way."""

    weight: Tensor  # [N, K] in the type of the activations, or in eight bits with scales
    bias: Tensor | None  # [N]
    scales: Tensor | None = None  # float32, [N, 1], or of blocks of 128 x 128 weights [ceil(N / 128), ceil(K / 128)]
    arrivals: Tensor | None = None  # [tiles] int32, zeros before and after a kernel; None: allocated per call

    def prefers_fp8(self, num_rows: int) -> bool:
        return False

    def takes_unnormed(self, x: Tensor) -> bool:
        """Whether this layer computes the norm before it as well: with one row, or where rows are split."""
        return self.takes_few_rows(x.shape[0]) and (x.shape[0] == 1 or self.scales is not None)

    def takes_few_rows(self, num_rows: int) -> bool:
        """Whether the kernels of this file multiply so many."""
        is_one = num_rows == 1 and self.scales is None
        if is_one:
            return self._is_fast
        is_small = self.weight.numel() <= LARGE or self.scales is not None
        return 0 < num_rows <= MAX_ROWS and is_small and has_whole_tiles(self.weight)

    @property
    def _is_fast(self) -> bool:
        """Whether the kernels of this file take the layer: 16 bytes to a load."""
        num_columns, width = self.weight.shape
        return num_columns % 16 == 0 and width % MIN_DEPTH == 0 and self.weight.is_contiguous()

    def __call__(self, x: Rows) -> Tensor:  # [T, K] -> [T, N]
        if isinstance(x, Fp8Rows) or not self.takes_few_rows(num_rows_of(x)):
            assert not isinstance(x, UnnormedRows)
            return self._many_rows(x)
        return self._few_rows(x)

    @abstractmethod
    def _many_rows(self, x: Tensor | Fp8Rows) -> Tensor: ...

    def gated(self, x: Tensor | UnnormedRows, activation: str) -> Tensor:  # [T, K] -> [T, N / 2]
        """Multiplies by gate and up, the halves of the weight, and applies the activation."""
        is_fast = self._is_fast and self.bias is None and self.weight.shape[0] % (2 * _TILE_COLUMNS) == 0
        if not is_fast or not 0 < num_rows_of(x) <= MAX_ROWS:
            return GATED[activation](self(x))
        return self._few_rows(x, activation)

    def _few_rows(self, rows: Tensor | UnnormedRows, activation: str | None = None) -> Tensor:
        x = rows.x if isinstance(rows, UnnormedRows) else rows
        if self.scales is None and x.shape[0] == 1:
            return multiply_one_row(rows, self.weight, self.bias, activation)
        width, num_matrices = self.weight.shape[1], 1 if activation is None else 2
        num_columns = self.weight.shape[0] // num_matrices
        out = torch.empty((x.shape[0], num_columns), dtype=x.dtype, device=x.device)
        tile = few_rows_tile(num_columns, width, self._scaling, is_gated=activation is not None)
        stage_bytes = num_matrices * _TILE_COLUMNS * tile.depth * self.weight.element_size()
        stage_bytes += _ROWS_BLOCK * tile.depth * x.element_size()
        # What is loaded before the wait takes the shared memory of a stage; where that is scarce, nothing is.
        room = fitting_stages(tile.stages + bool(tile.first_depth), stage_bytes, x.device)
        first_depth = tile.first_depth if room > _MIN_STAGES else 0
        partial, arrivals = out, out
        if tile.splits > 1:
            partial = torch.empty((tile.splits, *out.shape), dtype=torch.float32, device=x.device)
            arrivals = new_arrivals(self.weight) if self.arrivals is None else self.arrivals
        values, units = (x.contiguous(), x) if self.scales is None else split_rows(rows, self.weight.dtype)[:2]
        _multiply_rows[(num_columns // _TILE_COLUMNS, tile.splits)](
            values,
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
            return UNSCALED
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


class FewRowsTile(NamedTuple):
    depth: int
    first_depth: int  # of the part of the weight that is loaded before the wait; 0: none
    stages: int
    splits: int  # programs that share the depth of a tile


def few_rows_tile(num_columns: int, width: int, scaling: int, *, is_gated: bool) -> FewRowsTile:
    """The best of a sweep over graphs of whole decode layers of 4 and 16 rows on an H200, 2026-11-17."""
    if is_gated:
        return FewRowsTile(MIN_DEPTH, MIN_DEPTH if width > MIN_DEPTH else 0, 3, 1)
    has_wide_tiles = scaling == PER_COLUMN.value and width % (2 * 2 * MIN_DEPTH) == 0  # eight bits
    depth, stages = (2 * MIN_DEPTH, 5) if has_wide_tiles else (MIN_DEPTH, 4)
    many_tiles = _MANY_TILES if scaling == UNSCALED else _MANY_TILES_OF_8_BITS
    num_tiles = num_columns // _TILE_COLUMNS
    wanted = 4 if num_tiles <= many_tiles else 2 if num_tiles < _TILES_OF_HEADS else 1
    splits = next(splits for splits in (4, 2, 1) if splits <= wanted and width % (splits * depth) == 0)
    return FewRowsTile(depth, 0, stages, splits)


def has_whole_tiles(weight: Tensor) -> bool:
    num_columns, width = weight.shape
    return num_columns % _TILE_COLUMNS == 0 and width % MIN_DEPTH == 0 and weight.is_contiguous()


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
        # As floats: 256 times the sum of a whole row may not be an integer of 32 bits.
        FACTOR: tl.constexpr = 256 if weight.dtype.element_ty == tl.int8 else 1
        sums = sum_of_parts(sums.to(tl.float32), FACTOR, COLUMNS, ROWS) * unit[None, :]
        if ACTIVATION:
            up_sums = sum_of_parts(up_sums.to(tl.float32), FACTOR, COLUMNS, ROWS) * unit[None, :]
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
        blocks: tl.constexpr = (WIDTH + SCALED_LEN - 1) // SCALED_LEN
        scale = tl.load(scales + first_column // SCALED_LEN * blocks + depth // SCALED_LEN)
        return sums + tl.dot(tile, row) * scale
    elif tile.dtype == tl.int8:
        return tl.dot(tile, row, sums, out_dtype=tl.int32)
    elif SCALING == PER_COLUMN:
        # Tensor cores add up FP8 with 14 bits: no more than a tile. Only for 9.0 the compiler knows that by itself.
        return sums + tl.dot(tile, row, max_num_imprecise_acc=tile.shape[1])
    else:
        return tl.dot(tile, row, sums, input_precision="ieee")
