"""GEMMs with weights of four, six or eight bits and activations of 16 bits.

    words      [panels, K * bits / 32, PANEL]  32 bits: neighbours of a row, the first one in the lowest bits of the
                                               lower half, the second one in those of the upper half, the third one in
                                               the next bits of the lower half. With six bits three words have 16
                                               weights: the first two words their lower four bits, the third the others
    scales     [panels, K / group_len, PANEL]  a weight is value * scale + minimum; see `StoredScales`
    minima     [panels, K / group_len, PANEL]  empty if they follow from the scales
    outer      [panels, K / CHUNK, PANEL]      float16, empty unless scales and minima have eight bits
    integers   [rows, K] int16                 activations, rounded with a factor for each group of weights
    factors    [rows, 2, K / group_len]        these factors, and the sum of each group times its factor

One instruction multiplies pairs of integers of 16 bits and adds the two products: twice the multiplications of float32.
The sum of a group is exact; scales, factors and minima are applied to it in float32. So results depend neither on the
batch nor on the processor. Rounding to 16 bits changes an activation by at most 2 ** -16 of its group's largest one.

Each tile of rows takes the pairs from the words in registers; a chunk of a panel stays in the L1 cache for all of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.cpu.launch import Arguments, arguments_at, claim, kernel
from headrace.kernels.cpu.native import Pointer, after, floats, inner, int32s, uint8s
from headrace.kernels.cpu.panels import PANEL, TILE_ROWS, as_panels, copy_panel, tasks_of
from headrace.kernels.cpu.vectors import LANES
from headrace.kernels.cpu.weight_only_tiles import UNIT_LENS, WORD_BITS, form_of, multiply_words, round_group
from headrace.kernels.quantized import OUTER_LEN, GroupedWeight, with_group_len

CHUNK = OUTER_LEN  # of K: few enough that a panel's chunk stays in the L1 cache
ROWS_PER_TASK = 16  # that are rounded
MAX_ROWS = 256  # of a task: its panels are read from memory once for all of them


class Packed(NamedTuple):
    """A weight matrix as the kernel reads it."""

    words: Tensor  # [panels, K * bits / 32, PANEL] int32
    scales: Tensor  # [panels, groups, PANEL] float16, float32 or int8
    minima: Tensor  # likewise, or empty
    outer_scales: Tensor  # [panels, K / CHUNK, PANEL] float16, or empty
    outer_minima: Tensor
    bits: int
    zero: int  # a minimum that is not stored is -zero times its scale


def group_len_of(weight: GroupedWeight) -> int:
    """The length of the kernel's groups: it divides those of the weight, and a chunk."""
    return math.gcd(weight.group_len, CHUNK)


def can_pack(weight: GroupedWeight) -> bool:
    return group_len_of(weight) % max(LANES, UNIT_LENS[weight.bits]) == 0


def pack(weight: GroupedWeight) -> Packed:  # [N, K]
    stored = with_group_len(weight, group_len_of(weight)).stored_scales
    return Packed(
        _panels(_words(weight)),
        _panels(stored.scales),
        _panels(stored.minima),
        _panels(stored.outer_scales),
        _panels(stored.outer_minima),
        weight.bits,
        stored.zero or 0,
    )


def _words(weight: GroupedWeight) -> Tensor:  # [N, K * bits / 32]
    if weight.bits != 6:
        return _joined(weight.values, weight.bits)
    lower = _joined(weight.values & 15, 4).unflatten(1, (-1, 2))
    return torch.cat((lower, _joined(weight.values >> 4, 2).unsqueeze(2)), 2).flatten(1)


def _joined(values: Tensor, bits: int) -> Tensor:  # [N, K] -> [N, K * bits / 32] int32
    per_word = WORD_BITS // bits
    words = torch.zeros_like(values[:, ::per_word], dtype=torch.int32)
    shifted = torch.empty_like(words)  # once: new pages take longer than what is computed in them
    for number in range(per_word):
        shifted.copy_(values[:, number::per_word])
        words |= shifted.bitwise_left_shift_(bits * (number // 2) + 16 * (number % 2))
    return words


def _panels(matrix: Tensor | None) -> Tensor:
    return torch.empty(0) if matrix is None else as_panels(matrix)


def multiply(x: Tensor, packed: Packed, bias: Tensor, num_out: int) -> Tensor:  # [T, K] -> [T, N]
    """`bias`: one value for each output of all panels. x may have any stride between rows."""
    num_rows, depth = x.shape
    out = torch.empty(num_rows, num_out)
    if num_rows:
        num_panels, num_groups = packed.scales.shape[:2]
        tasks = tasks_of(num_rows, num_panels, MAX_ROWS)
        integers, factors = rounded_rows(x, num_groups) if num_rows > TILE_ROWS else (0, 0)
        form = form_of(packed.scales.dtype, has_minima=packed.minima.numel() > 0)
        sizes = (packed.bits, form, packed.scales.element_size(), packed.zero, num_groups, depth // num_groups)
        strides = (x.stride(0), num_rows, num_out, depth, num_panels)
        tensors = (x, integers, factors, *packed[:5], bias, out)
        _multiply(*tensors, *sizes, *strides, *tasks, num_tasks=tasks.num_tasks)
    return out


def rounded_rows(x: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:  # [T, K] -> integers, factors
    num_rows, depth = x.shape
    integers = torch.empty(num_rows, depth, dtype=torch.int16)
    factors = torch.empty(num_rows, 2, num_groups)
    sizes = (x.stride(0), num_rows, depth, num_groups, depth // num_groups)
    _round(x, integers, factors, *sizes, num_tasks=-(-num_rows // ROWS_PER_TASK))
    return integers, factors


@kernel(
    x="pointer",
    integers="pointer",
    factors="pointer",
    x_stride="integer",
    num_rows="integer",
    depth="integer",
    num_groups="integer",
    group_len="integer",
)
def _round(pointer: Pointer) -> None:
    a = arguments_at(pointer)
    first_row = claim(pointer) * ROWS_PER_TASK
    while first_row < a.num_rows:
        for row in range(first_row, min(first_row + ROWS_PER_TASK, a.num_rows)):
            _round_row(a, row, a.integers, a.factors)
        first_row = claim(pointer) * ROWS_PER_TASK


@kernel(
    x="pointer",
    integers="pointer",  # 0: each thread rounds the rows itself
    factors="pointer",
    words="pointer",
    scales="pointer",
    minima="pointer",
    outer_scales="pointer",
    outer_minima="pointer",
    bias="pointer",
    out="pointer",
    bits="integer",
    form="integer",
    scale_bytes="integer",
    zero="integer",
    num_groups="integer",
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
    task = claim(pointer)
    if task >= a.num_tasks:
        return
    scratch = np.empty(a.row_block * PANEL, dtype=np.float32)
    own_integers, own_factors = np.empty(0, dtype=np.int16), np.empty(0, dtype=np.float32)
    if a.integers == 0:
        own_integers = np.empty(a.num_rows * a.depth, dtype=np.int16)
        own_factors = np.empty(a.num_rows * a.num_groups * 2, dtype=np.float32)
        for row in range(a.num_rows):
            _round_row(a, row, int(own_integers.ctypes.data), int(own_factors.ctypes.data))
    while task < a.num_tasks:
        integers, factors = a.integers, a.factors
        if integers == 0:  # here, and not before the loop: numba frees an array after the last line that names it
            integers, factors = int(own_integers.ctypes.data), int(own_factors.ctypes.data)
        block, part = divmod(task, a.tasks_per_block)
        first_row, first_panel = block * a.row_block, part * a.panels_per_task
        num_rows = min(a.row_block, a.num_rows - first_row)
        for panel in range(first_panel, min(first_panel + a.panels_per_task, a.num_panels)):
            _multiply_panel(
                a,
                after(uint8s(integers), first_row * a.depth * 2),
                after(floats(factors), first_row * a.num_groups * 2),
                floats(scratch.ctypes.data),
                panel,
                first_row,
                num_rows,
            )
        task = claim(pointer)


@inner
def _multiply_panel(
    a: Arguments,
    integers: Pointer,
    factors: Pointer,
    scratch: Pointer,
    panel: int,
    first_row: int,
    num_rows: int,
) -> None:
    before, before_stride = after(floats(a.bias), panel * PANEL), 0
    for start in range(0, a.depth, CHUNK):
        first_group = start // a.group_len
        scales = (panel * a.num_groups + first_group) * PANEL * a.scale_bytes
        outer = (panel * (a.depth // CHUNK) + start // CHUNK) * PANEL * 2
        for row in range(0, num_rows, TILE_ROWS):
            multiply_words(
                min(TILE_ROWS, num_rows - row),
                a.bits,
                after(int32s(a.words), (panel * a.depth + start) * a.bits // WORD_BITS * PANEL),
                a.form,
                uint8s(a.scales + scales),
                uint8s(a.minima + scales),
                uint8s(a.outer_scales + outer),
                uint8s(a.outer_minima + outer),
                np.float32(-a.zero),
                min(CHUNK, a.depth - start) // a.group_len,
                a.group_len,
                after(integers, (row * a.depth + start) * 2),
                a.depth,
                after(factors, row * a.num_groups * 2 + first_group),
                a.num_groups,
                after(before, row * before_stride),
                before_stride,
                after(scratch, row * PANEL),
                PANEL,
            )
        before, before_stride = scratch, PANEL
    copy_panel(scratch, floats(a.out), panel, first_row, num_rows, a.num_out)


@inner
def _round_row(a: Arguments, row: int, integers: int, factors: int) -> None:
    for group in range(a.num_groups):
        start = group * a.group_len
        round_group(
            after(floats(a.x), row * a.x_stride + start),
            a.group_len // LANES,
            after(uint8s(integers), (row * a.depth + start) * 2),
            after(floats(factors), row * a.num_groups * 2 + group),
            a.num_groups,
        )
