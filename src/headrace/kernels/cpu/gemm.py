"""float32 GEMMs with weights packed as panels: [panels, K, PANEL], see `as_panels`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from headrace.kernels.cpu.launch import Arguments, arguments_at, claim, kernel
from headrace.kernels.cpu.native import Pointer, after, floats, inner
from headrace.kernels.cpu.panels import (
    NUM_VECTORS,
    PANEL,
    ROW_BLOCK,
    SIZE,
    TILE_ROWS,
    copy_panel,
    emit_for_rows,
    emit_sums,
    tasks_of,
)
from headrace.kernels.cpu.vectors import FLOATS, LANES, constants, emit_fma, emit_load, emit_splat, emit_store

CHUNK = 256  # of K: few enough that a panel's chunk stays in the L2 cache, and that sums of float32 stay exact


def multiply(x: Tensor, packed: Tensor, bias: Tensor, num_out: int) -> Tensor:  # [T, K] -> [T, N]
    """`bias`: one value for each output of all panels. x may have any stride between rows."""
    num_rows, depth = x.shape
    out = torch.empty(num_rows, num_out)
    if num_rows:
        tasks = tasks_of(num_rows, len(packed))
        strides = (x.stride(0), num_rows, num_out, depth, len(packed))
        _multiply(x, packed, bias, out, *strides, *tasks, num_tasks=tasks.num_tasks)
    return out


@kernel(
    x="pointer",
    packed="pointer",
    bias="pointer",
    out="pointer",
    x_stride="integer",
    num_rows="integer",
    num_out="integer",
    depth="integer",
    num_panels="integer",
    row_block="integer",
    panels_per_task="integer",
    tasks_per_block="integer",
    num_tasks="integer",
)
def _multiply(pointer: Pointer) -> None:
    a = arguments_at(pointer)
    scratch = np.empty(ROW_BLOCK * PANEL, dtype=np.float32)
    task = claim(pointer)
    while task < a.num_tasks:
        block, part = divmod(task, a.tasks_per_block)
        first_row, first_panel = block * a.row_block, part * a.panels_per_task
        num_rows = min(a.row_block, a.num_rows - first_row)
        for panel in range(first_panel, min(first_panel + a.panels_per_task, a.num_panels)):
            _multiply_panel(a, floats(scratch.ctypes.data), panel, first_row, num_rows)
        task = claim(pointer)


@inner
def _multiply_panel(a: Arguments, scratch: Pointer, panel: int, first_row: int, num_rows: int) -> None:
    for start in range(0, a.depth, CHUNK):
        weights = after(floats(a.packed), (panel * a.depth + start) * PANEL)
        for row in range(0, num_rows, TILE_ROWS):
            x = after(floats(a.x), (first_row + row) * a.x_stride + start)
            tile = after(scratch, row * PANEL)
            before, before_stride = tile, PANEL
            if start == 0:
                before, before_stride = after(floats(a.bias), panel * PANEL), 0
            depth, count = min(CHUNK, a.depth - start), min(TILE_ROWS, num_rows - row)
            multiply_tile(count, x, a.x_stride, weights, depth, before, before_stride, tile, PANEL)
    copy_panel(scratch, floats(a.out), panel, first_row, num_rows, a.num_out)


_FLOAT_POINTER = types.CPointer(types.float32)


@intrinsic
def multiply_tile(
    typing: Any,
    num_rows: Any,
    x: Any,
    x_stride: Any,
    weights: Any,  # [depth, PANEL]
    depth: Any,
    before: Any,  # [rows, PANEL], what the sums are added to
    before_stride: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """Multiplies a chunk of up to TILE_ROWS rows by the same chunk of a panel."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_for_rows(builder, args[0], lambda count: _emit_tile(builder, count, *args[1:]))
        return context.get_dummy_value()

    size, pointer = types.intp, _FLOAT_POINTER
    return types.void(size, pointer, size, pointer, size, pointer, size, pointer, size), emit


def _emit_tile(
    b: ir.IRBuilder,
    num_rows: int,
    x: ir.Value,
    x_stride: ir.Value,
    weights: ir.Value,
    depth: ir.Value,
    before: ir.Value,
    before_stride: ir.Value,
    out: ir.Value,
    out_stride: ir.Value,
) -> None:
    rows = [b.gep(x, [b.mul(x_stride, SIZE(row))]) for row in range(num_rows)]
    places = [(row, v) for row in range(num_rows) for v in range(NUM_VECTORS)]

    def step(k: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        first = b.mul(k, SIZE(PANEL))
        columns = [emit_load(b, weights, b.add(first, SIZE(v * LANES))) for v in range(NUM_VECTORS)]
        inputs = [emit_splat(b, b.load(b.gep(row, [k])), FLOATS) for row in rows]
        return [emit_fma(b, inputs[row], columns[v], total) for (row, v), total in zip(places, sums, strict=True)]

    sums = emit_sums(b, depth, [constants(0.0)] * len(places), step)
    for (row, v), total in zip(places, sums, strict=True):
        known = emit_load(b, before, b.add(b.mul(before_stride, SIZE(row)), SIZE(v * LANES)))
        emit_store(b, out, b.add(b.mul(out_stride, SIZE(row)), SIZE(v * LANES)), b.fadd(known, total))
