"""INT8 GEMMs: weights and activations of eight bits, exact sums of 32 bits, scales applied to the sums.

    weights   [panels, K / GROUP, PANEL, GROUP]   one instruction multiplies GROUP neighbours of a row, and adds them
    rows      [rows, K / GROUP, GROUP]            quantized by each thread that needs them

Each CHUNK inputs of a row have a scale of their own: with one scale for the whole row, a single large input takes the
digits of all others (docs/quantization.md). With VNNI a group is four bytes. Its instruction multiplies unsigned by
signed bytes, so activations are stored plus 128, and 128 times the sum of an output's weights is subtracted. Elsewhere
a group is two numbers of 16 bits, since the instruction for bytes saturates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from headrace.kernels.cpu.launch import Arguments, arguments_at, claim, kernel
from headrace.kernels.cpu.native import Pointer, after, floats, inner, int32s, uint8s
from headrace.kernels.cpu.panels import (
    NUM_VECTORS,
    PANEL,
    ROW_BLOCK,
    SIZE,
    TILE_ROWS,
    copy_panel,
    emit_for_rows,
    emit_sums,
    padded,
    tasks_of,
)
from headrace.kernels.cpu.vectors import (
    FLOATS,
    HAS_VNNI,
    INTS,
    LANES,
    SHORTS,
    absolute,
    add,
    divide,
    emit_dot_bytes,
    emit_dot_shorts,
    emit_fma,
    emit_load,
    emit_prefetch,
    emit_splat,
    emit_store,
    largest,
    load,
    maximum,
    multiply,
    splat,
    total,
    vector,
)

GROUP = 4 if HAS_VNNI else 2
GROUP_BYTES = 4  # of a row
OFFSET = 128 if HAS_VNNI else 0
LARGEST = 127.0
CHUNK = 128  # of K
_GROUPS = CHUNK // GROUP
_TINY = 1e-12  # largest value of a chunk of zeros
_BYTE, _SHORT, _INT = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_STORED = _BYTE if HAS_VNNI else _SHORT  # an activation


class Packed(NamedTuple):
    """A weight matrix as the kernel reads it. Scales and bias have one value for each output of all panels."""

    weights: Tensor  # [panels, groups, PANEL, GROUP] int8
    offsets: Tensor  # [panels, chunks, PANEL] int32, what the sum of a chunk starts with
    scales: Tensor  # float32
    bias: Tensor  # float32


def pack(values: Tensor, scales: Tensor, bias: Tensor) -> Packed:  # [N, K] int8, [N], [N]
    num_out, depth = values.shape
    whole = torch.nn.functional.pad(values.detach(), (0, -depth % GROUP, 0, -num_out % PANEL))
    groups = whole.unflatten(1, (-1, GROUP))  # [panels * PANEL, groups, GROUP]
    sums = torch.stack([chunk.sum((1, 2), dtype=torch.int32) for chunk in groups.split(_GROUPS, 1)], 1)
    return Packed(
        groups.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous(),
        (sums * -OFFSET).unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous(),
        padded(scales),
        padded(bias),
    )


def multiply_packed(x: Tensor, packed: Packed, num_out: int) -> Tensor:  # [T, K] -> [T, N]
    """x may have any stride between rows."""
    num_rows, depth = x.shape
    out = torch.empty(num_rows, num_out)
    if num_rows:
        num_panels, num_groups = packed.weights.shape[:2]
        tasks = tasks_of(num_rows, num_panels)
        sizes = (x.stride(0), num_rows, num_out, depth, num_groups, packed.offsets.shape[1], num_panels)
        _multiply(x, *packed, out, *sizes, *tasks, num_tasks=tasks.num_tasks)
    return out


@kernel(
    x="pointer",
    packed="pointer",
    offsets="pointer",
    scales="pointer",
    bias="pointer",
    out="pointer",
    x_stride="integer",
    num_rows="integer",
    num_out="integer",
    depth="integer",
    num_groups="integer",
    num_chunks="integer",
    num_panels="integer",
    row_block="integer",
    panels_per_task="integer",
    tasks_per_block="integer",
    num_tasks="integer",
)
def _multiply(pointer: Pointer) -> None:
    a = arguments_at(pointer)
    quantized = np.empty(a.row_block * a.num_groups * GROUP_BYTES, dtype=np.uint8)
    row_scales = np.empty(a.row_block * a.num_chunks, dtype=np.float32)
    scratch = np.empty(ROW_BLOCK * PANEL, dtype=np.float32)
    quantized_block = -1
    task = claim(pointer)
    while task < a.num_tasks:
        block, part = divmod(task, a.tasks_per_block)
        first_row, first_panel = block * a.row_block, part * a.panels_per_task
        num_rows = min(a.row_block, a.num_rows - first_row)
        # Here, and not before the loop: numba frees an array after the last line that names it.
        rows, scales = uint8s(quantized.ctypes.data), floats(row_scales.ctypes.data)
        if block != quantized_block:
            _quantize_rows(a, rows, scales, first_row, num_rows)
            quantized_block = block
        for panel in range(first_panel, min(first_panel + a.panels_per_task, a.num_panels)):
            _multiply_panel(a, rows, scales, floats(scratch.ctypes.data), panel, first_row, num_rows)
        task = claim(pointer)


@inner
def _quantize_rows(a: Arguments, rows: Pointer, scales: Pointer, first_row: int, num_rows: int) -> None:
    for row in range(num_rows):
        for chunk in range(a.num_chunks):
            x = after(floats(a.x), (first_row + row) * a.x_stride + chunk * CHUNK)
            depth = min(CHUNK, a.depth - chunk * CHUNK)
            scale = _scale_of(x, depth)
            scales[row * a.num_chunks + chunk] = scale
            _quantize(x, after(rows, (row * a.num_groups + chunk * _GROUPS) * GROUP_BYTES), scale, depth)


@inner
def _scale_of(x: Pointer, depth: int) -> float:
    """Returns the largest absolute value / 127; NaN if a value is not finite."""
    whole = depth // LANES * LANES
    tops, nothing = splat(np.float32(_TINY)), splat(np.float32(0.0))
    for k in range(0, whole, LANES):
        value = load(x, k)
        tops = maximum(tops, absolute(value))
        nothing = add(nothing, multiply(value, splat(np.float32(0.0))))
    top, rest = largest(tops), total(nothing)
    for k in range(whole, depth):
        top = max(top, abs(x[k]))
        rest += x[k] * np.float32(0.0)
    scale: float = top / np.float32(LARGEST) + rest
    return scale


@inner
def _quantize(x: Pointer, out: Pointer, scale: float, depth: int) -> None:
    whole = depth // LANES * LANES
    for k in range(0, whole, LANES):
        _store_rounded(out, k, divide(load(x, k), splat(scale)))
    for k in range(whole, depth):
        _store_one_rounded(out, k, x[k] / scale)
    for k in range(depth, (depth + GROUP - 1) // GROUP * GROUP):
        _store_one_rounded(out, k, np.float32(0.0))


def _emit_rounded(b: ir.IRBuilder, lanes: int, out: ir.Value, k: ir.Value, value: ir.Value) -> None:
    """Rounds to the nearest integers, and stores them from element k of a row on."""
    name, wide = ("llvm.rint.f32", _INT) if lanes == 1 else (f"llvm.rint.v{lanes}f32", INTS)
    stored = _STORED if lanes == 1 else ir.VectorType(_STORED, lanes)
    rint = cgutils.get_or_insert_function(b.module, ir.FunctionType(value.type, [value.type]), name)
    offset = _INT(OFFSET) if lanes == 1 else ir.Constant(INTS, [OFFSET] * lanes)
    integers = b.trunc(b.add(b.fptosi(b.call(rint, [value]), wide), offset), stored)
    target = b.gep(out, [b.mul(k, SIZE(_STORED.width // 8))])
    b.store(integers, b.bitcast(target, stored.as_pointer()), align=1)


@intrinsic
def _store_rounded(typing: Any, out: Any, k: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit_rounded(builder, LANES, *args)
        return context.get_dummy_value()

    return types.void(types.CPointer(types.uint8), types.intp, vector), emit


@intrinsic
def _store_one_rounded(typing: Any, out: Any, k: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit_rounded(builder, 1, *args)
        return context.get_dummy_value()

    return types.void(types.CPointer(types.uint8), types.intp, types.float32), emit


@inner
def _multiply_panel(
    a: Arguments, rows: Pointer, row_scales: Pointer, scratch: Pointer, panel: int, first_row: int, num_rows: int
) -> None:
    scales, bias = after(floats(a.scales), panel * PANEL), after(floats(a.bias), panel * PANEL)
    for chunk in range(a.num_chunks):
        first_group = chunk * _GROUPS
        weights = after(uint8s(a.packed), (panel * a.num_groups + first_group) * PANEL * GROUP)
        offsets = after(int32s(a.offsets), (panel * a.num_chunks + chunk) * PANEL)
        for row in range(0, num_rows, TILE_ROWS):
            tile = after(scratch, row * PANEL)
            before, before_stride = tile, PANEL
            if chunk == 0:
                before, before_stride = bias, 0
            _multiply_tile(
                min(TILE_ROWS, num_rows - row),
                after(rows, (row * a.num_groups + first_group) * GROUP_BYTES),
                a.num_groups * GROUP_BYTES,
                after(row_scales, row * a.num_chunks + chunk),
                a.num_chunks,
                weights,
                min(_GROUPS, a.num_groups - first_group),
                offsets,
                scales,
                before,
                before_stride,
                tile,
                PANEL,
            )
    copy_panel(scratch, floats(a.out), panel, first_row, num_rows, a.num_out)


@intrinsic
def _multiply_tile(
    typing: Any,
    num_rows: Any,
    rows: Any,  # [rows, groups, GROUP]
    row_bytes: Any,  # from one row to the next
    row_scales: Any,
    row_scale_stride: Any,
    weights: Any,  # [groups, PANEL, GROUP]
    num_groups: Any,
    offsets: Any,
    scales: Any,
    before: Any,  # [rows, PANEL], what the sums are added to
    before_stride: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """Multiplies a chunk of up to TILE_ROWS quantized rows by the same chunk of a panel."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_for_rows(builder, args[0], lambda count: _emit_tile(builder, count, *args[1:]))
        return context.get_dummy_value()

    size, byte, integer, number = (
        types.intp,
        types.CPointer(types.uint8),
        types.CPointer(types.int32),
        types.CPointer(types.float32),
    )
    arguments = (size, byte, size, number, size, byte, size, integer, number, number, size, number, size)
    return types.void(*arguments), emit


def _emit_tile(
    b: ir.IRBuilder,
    num_rows: int,
    rows: ir.Value,
    row_bytes: ir.Value,
    row_scales: ir.Value,
    row_scale_stride: ir.Value,
    weights: ir.Value,
    num_groups: ir.Value,
    offsets: ir.Value,
    scales: ir.Value,
    before: ir.Value,
    before_stride: ir.Value,
    out: ir.Value,
    out_stride: ir.Value,
) -> None:
    inputs = [b.gep(rows, [b.mul(row_bytes, SIZE(row))]) for row in range(num_rows)]
    places = [(row, v) for row in range(num_rows) for v in range(NUM_VECTORS)]
    dot = emit_dot_bytes if HAS_VNNI else emit_dot_shorts

    def step(group: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        first = b.mul(group, SIZE(PANEL * GROUP))
        columns = [_weights(b, b.gep(weights, [b.add(first, SIZE(v * LANES * GROUP))])) for v in range(NUM_VECTORS)]
        for v in range(NUM_VECTORS):  # the next chunk, while further rows are multiplied by this one
            emit_prefetch(b, weights, b.add(first, SIZE((_GROUPS * PANEL + v * LANES) * GROUP)))
        values = [_group_in_all_lanes(b, b.gep(row, [b.mul(group, SIZE(GROUP_BYTES))])) for row in inputs]
        return [dot(b, values[row], columns[v], known) for (row, v), known in zip(places, sums, strict=True)]

    starts = [emit_load(b, offsets, SIZE(v * LANES), INTS) for _, v in places]
    sums = emit_sums(b, num_groups, starts, step)
    for (row, v), found in zip(places, sums, strict=True):
        of_row = b.load(b.gep(row_scales, [b.mul(row_scale_stride, SIZE(row))]))
        scale = b.fmul(emit_load(b, scales, SIZE(v * LANES)), emit_splat(b, of_row, FLOATS))
        known = emit_load(b, before, b.add(b.mul(before_stride, SIZE(row)), SIZE(v * LANES)))
        value = emit_fma(b, b.sitofp(found, FLOATS), scale, known)
        emit_store(b, out, b.add(b.mul(out_stride, SIZE(row)), SIZE(v * LANES)), value)


def _weights(b: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
    """Loads a group of LANES outputs."""
    if HAS_VNNI:
        return b.load(b.bitcast(pointer, INTS.as_pointer()), align=1)
    stored = ir.VectorType(_BYTE, 2 * LANES)
    return b.sext(b.load(b.bitcast(pointer, stored.as_pointer()), align=1), SHORTS)


def _group_in_all_lanes(b: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
    group = emit_splat(b, b.load(b.bitcast(pointer, _INT.as_pointer()), align=1), INTS)
    return group if HAS_VNNI else b.bitcast(group, SHORTS)
