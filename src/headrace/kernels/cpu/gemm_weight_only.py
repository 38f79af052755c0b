"""float32 GEMMs with weights of four or eight bits, which are dequantized as they are read.

    words      [panels, K / per word, PANEL]   32 bits: neighbours of a row, the first one in the lowest bits
    scales     [panels, K / group_len, PANEL]  float16 or float32; a weight is value * scale + minimum
    minima     [panels, K / group_len, PANEL]  of the same type

Up to TILE_ROWS rows are multiplied by weights in registers. For more of them a thread first dequantizes a chunk of a
panel, and multiplies it as `gemm` does. Weights and the order of sums are those of `gemm`, so the results are the same
to the last bit as with weights that were dequantized at load, if value * scale has no more digits than a float32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from headrace.kernels.cpu import gemm
from headrace.kernels.cpu.launch import (
    Arguments,
    Pointer,
    after,
    arguments_at,
    claim,
    floats,
    inner,
    int32s,
    kernel,
    uint8s,
)
from headrace.kernels.cpu.panels import (
    NUM_VECTORS,
    PANEL,
    SIZE,
    TILE_ROWS,
    copy_columns,
    emit_sums,
    tasks_of,
)
from headrace.kernels.cpu.vectors import (
    FLOATS,
    INTS,
    LANES,
    constants,
    emit_fma,
    emit_load,
    emit_prefetch,
    emit_splat,
    emit_store,
)
from headrace.kernels.quantized import GroupedWeight, with_group_len

CHUNK = gemm.CHUNK
MAX_ROWS = 256  # of a task: its panels are dequantized once for all of them
WORDS_AHEAD = 16  # prefetched, for each output of a panel: 3 KiB, about what arrives while they are computed
_WORD_BITS = 32
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_FORMS = [(bits, is_half) for bits in (4, 8) for is_half in (False, True)]


class Packed(NamedTuple):
    """A weight matrix as the kernel reads it."""

    words: Tensor  # [panels, K / per word, PANEL] int32
    scales: Tensor  # [panels, groups, PANEL] float16 or float32
    minima: Tensor
    bits: int


def group_len_of(weight: GroupedWeight) -> int:
    """The length of the kernel's groups: it divides those of the weight, and a chunk."""
    return math.gcd(weight.group_len, CHUNK)


def can_pack(weight: GroupedWeight) -> bool:
    return group_len_of(weight) % (_WORD_BITS // weight.bits) == 0


def pack(weight: GroupedWeight) -> Packed:  # [N, K]
    bits, scale_type = weight.bits, weight.scale_type
    per_word = _WORD_BITS // bits
    words = weight.values[:, ::per_word].to(torch.int32)
    for place in range(1, per_word):
        words |= weight.values[:, place::per_word].to(torch.int32) << bits * place
    groups = with_group_len(weight, group_len_of(weight))
    scales, minima = (_panels(each.to(scale_type)) for each in (groups.scales, groups.minima))
    return Packed(_panels(words), scales, minima, bits)


def _panels(matrix: Tensor) -> Tensor:  # [N, M] -> [panels, M, PANEL]
    whole = torch.nn.functional.pad(matrix, (0, 0, 0, -len(matrix) % PANEL))
    panels: Tensor = whole.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
    return panels


def multiply(x: Tensor, packed: Packed, bias: Tensor, num_out: int) -> Tensor:  # [T, K] -> [T, N]
    """`bias`: one value for each output of all panels. x may have any stride between rows."""
    num_rows, depth = x.shape
    out = torch.empty(num_rows, num_out)
    if num_rows:
        num_panels, num_groups = packed.scales.shape[:2]
        tasks = tasks_of(num_rows, num_panels, MAX_ROWS)
        form = _FORMS.index((packed.bits, packed.scales.dtype == torch.float16))
        sizes = (form, packed.bits, packed.scales.element_size(), depth // num_groups)
        strides = (x.stride(0), num_rows, num_out, depth, num_panels)
        _multiply(x, *packed[:3], bias, out, *sizes, *strides, *tasks, num_tasks=tasks.num_tasks)
    return out


@kernel(
    x="pointer",
    words="pointer",
    scales="pointer",
    minima="pointer",
    bias="pointer",
    out="pointer",
    form="integer",
    bits="integer",
    scale_bytes="integer",
    group_len="integer",
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
    scratch = np.empty(a.row_block * PANEL, dtype=np.float32)
    weights = np.empty(CHUNK * PANEL, dtype=np.float32)
    task = claim(pointer)
    while task < a.num_tasks:
        block, part = divmod(task, a.tasks_per_block)
        first_row, first_panel = block * a.row_block, part * a.panels_per_task
        num_rows = min(a.row_block, a.num_rows - first_row)
        for panel in range(first_panel, min(first_panel + a.panels_per_task, a.num_panels)):
            _multiply_panel(a, floats(scratch.ctypes.data), floats(weights.ctypes.data), panel, first_row, num_rows)
        task = claim(pointer)


@inner
def _multiply_panel(
    a: Arguments, scratch: Pointer, weights: Pointer, panel: int, first_row: int, num_rows: int
) -> None:
    out = after(floats(a.out), first_row * a.num_out + panel * PANEL)
    num_columns = min(PANEL, a.num_out - panel * PANEL)
    target, stride = out, a.num_out
    if num_columns < PANEL:
        target, stride = scratch, PANEL
    bias = after(floats(a.bias), panel * PANEL)
    for start in range(0, a.depth, CHUNK):
        depth = min(CHUNK, a.depth - start)
        words = after(int32s(a.words), (panel * a.depth + start) * a.bits // 32 * PANEL)
        first_group = (panel * a.depth + start) // a.group_len * PANEL * a.scale_bytes
        scales, minima = after(uint8s(a.scales), first_group), after(uint8s(a.minima), first_group)
        x = after(floats(a.x), first_row * a.x_stride + start)
        before, before_stride = target, stride
        if start == 0:
            before, before_stride = bias, 0
        fused, tile, tile_stride = num_rows, target, stride
        if num_rows > TILE_ROWS:
            fused, tile, tile_stride = 0, weights, PANEL
        _multiply_packed_tile(
            fused,
            a.form,
            words,
            scales,
            minima,
            depth // a.group_len,
            a.group_len * a.bits // 32,
            x,
            a.x_stride,
            before,
            before_stride,
            tile,
            tile_stride,
        )
        if num_rows > TILE_ROWS:
            for row in range(0, num_rows, TILE_ROWS):
                gemm.multiply_tile(
                    min(TILE_ROWS, num_rows - row),
                    after(x, row * a.x_stride),
                    a.x_stride,
                    weights,
                    depth,
                    after(before, row * before_stride),
                    before_stride,
                    after(target, row * stride),
                    stride,
                )
    if num_columns < PANEL:
        copy_columns(scratch, out, num_rows, num_columns, a.num_out)


_FLOAT_POINTER, _BYTE_POINTER, _INT_POINTER = (
    types.CPointer(each) for each in (types.float32, types.uint8, types.int32)
)


@intrinsic
def _multiply_packed_tile(
    typing: Any,
    num_rows: Any,  # 0: the weights themselves are stored
    form: Any,
    words: Any,  # [groups, words, PANEL]
    scales: Any,  # [groups, PANEL]
    minima: Any,
    num_groups: Any,
    num_words: Any,  # of a group
    x: Any,
    x_stride: Any,
    before: Any,  # [rows, PANEL], what the sums are added to
    before_stride: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """Multiplies a chunk of up to TILE_ROWS rows by the same chunk of a panel, or dequantizes that."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        num_rows, form, *rest = args
        choices = [(count, number) for number in range(len(_FORMS)) for count in range(TILE_ROWS + 1)]
        blocks = [b.append_basic_block(f"form{number}rows{count}") for count, number in choices]
        end = b.append_basic_block("end")
        choice = b.switch(b.add(b.mul(form, SIZE(TILE_ROWS + 1)), num_rows), blocks[0])
        for index, ((count, number), block) in enumerate(zip(choices, blocks, strict=True)):
            if index:
                choice.add_case(SIZE(index), block)
            b.position_at_end(block)
            _emit_tile(b, count, *_FORMS[number], *rest)
            b.branch(end)
        b.position_at_end(end)
        return context.get_dummy_value()

    size = types.intp
    given = (size, size, _INT_POINTER, _BYTE_POINTER, _BYTE_POINTER, size, size)
    return types.void(*given, _FLOAT_POINTER, size, _FLOAT_POINTER, size, _FLOAT_POINTER, size), emit


def _emit_tile(
    b: ir.IRBuilder,
    num_rows: int,
    bits: int,
    is_half: bool,
    words: ir.Value,
    scales: ir.Value,
    minima: ir.Value,
    num_groups: ir.Value,
    num_words: ir.Value,
    x: ir.Value,
    x_stride: ir.Value,
    before: ir.Value,
    before_stride: ir.Value,
    out: ir.Value,
    out_stride: ir.Value,
) -> None:
    per_word = _WORD_BITS // bits
    rows = [b.gep(x, [b.mul(x_stride, SIZE(row))]) for row in range(num_rows)]
    places = [(row, v) for row in range(num_rows) for v in range(NUM_VECTORS)]

    def of_group(group: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        first_word = b.mul(group, num_words)
        starts = [b.add(b.mul(group, SIZE(PANEL)), SIZE(v * LANES)) for v in range(NUM_VECTORS)]
        factors, offsets = ([_emit_widened(b, each, at, is_half) for at in starts] for each in (scales, minima))

        def of_word(number: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            word = b.add(first_word, number)
            starts = [b.add(b.mul(word, SIZE(PANEL)), SIZE(v * LANES)) for v in range(NUM_VECTORS)]
            packed = [emit_load(b, words, at, INTS) for at in starts]
            for at in starts:
                emit_prefetch(b, words, b.add(at, SIZE(WORDS_AHEAD * PANEL)))
            first = b.mul(word, SIZE(per_word))
            for place in range(per_word):
                k = b.add(first, SIZE(place))
                values = [_emit_value(b, each, bits, place) for each in packed]
                weights = [emit_fma(b, *each) for each in zip(values, factors, offsets, strict=True)]
                if not num_rows:
                    for v, weight in enumerate(weights):
                        emit_store(b, out, b.add(b.mul(k, SIZE(PANEL)), SIZE(v * LANES)), weight)
                inputs = [emit_splat(b, b.load(b.gep(row, [k])), FLOATS) for row in rows]
                sums = [emit_fma(b, inputs[row], weights[v], sum_) for (row, v), sum_ in zip(places, sums, strict=True)]
            return sums

        return emit_sums(b, num_words, sums, of_word)

    sums = emit_sums(b, num_groups, [constants(0.0)] * len(places), of_group)
    for (row, v), total in zip(places, sums, strict=True):
        known = emit_load(b, before, b.add(b.mul(before_stride, SIZE(row)), SIZE(v * LANES)))
        emit_store(b, out, b.add(b.mul(out_stride, SIZE(row)), SIZE(v * LANES)), b.fadd(known, total))


def _emit_widened(b: ir.IRBuilder, pointer: ir.Value, index: ir.Value, is_half: bool) -> ir.Value:
    """Loads LANES numbers of either type from element `index` on."""
    stored = _HALVES if is_half else FLOATS
    address = b.gep(pointer, [b.mul(index, SIZE(2 if is_half else 4))])
    value = b.load(b.bitcast(address, stored.as_pointer()), align=2)
    return b.fpext(value, FLOATS) if is_half else value


def _emit_value(b: ir.IRBuilder, words: ir.Value, bits: int, place: int) -> ir.Value:
    """Converts the values at one place of LANES words."""
    shifted = words if place == 0 else b.lshr(words, ir.Constant(INTS, [bits * place] * LANES))
    if place < _WORD_BITS // bits - 1:
        shifted = b.and_(shifted, ir.Constant(INTS, [(1 << bits) - 1] * LANES))
    return b.sitofp(shifted, FLOATS)
