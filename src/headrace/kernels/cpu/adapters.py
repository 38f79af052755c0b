"""The low-rank products of LoRA adapters for few rows, each with the matrices of its own adapter.

    _shrink    small[row, r, p] = x[row] · down[adapter, r, p]         a task: some r of a row
    _expand    out[row, n] += up[adapter, n] · small[row, :, p of n]   a task: some n of a row

Many rows of one adapter, as in a prefill, are multiplied together by the reference.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import reference
from headrace.kernels.cpu.launch import arguments_at, claim, kernel
from headrace.kernels.cpu.native import Pointer, after, floats, inner, int32s
from headrace.kernels.cpu.vectors import LANES, add, fma, load, splat, total
from headrace.kernels.layout import AdapterRows, LowRankWeights

_MAX_ROWS = 32  # of one adapter; with more, GEMMs are faster, each of which takes as long as 30 rows to begin
_RANKS = 8  # of a task of `_shrink`
_COLUMNS = 256  # of a task of `_expand`


def add_low_rank(out: Tensor, x: Tensor, weights: LowRankWeights, rows: AdapterRows) -> None:
    """See `ops.add_low_rank`."""
    numbers = [end - start for start, end in pairwise(rows.starts.tolist())]
    if max(numbers) <= _MAX_ROWS:
        _add_by_row(out, x, weights, rows)
    elif not any(0 < number <= _MAX_ROWS for number in numbers):
        reference.add_low_rank(out, x, weights, rows)
    else:
        are_few = torch.tensor(numbers) <= _MAX_ROWS  # a rank of 0 leaves an adapter out
        _add_by_row(out, x, replace(weights, ranks=weights.ranks * are_few), rows)
        reference.add_low_rank(out, x, replace(weights, ranks=weights.ranks * ~are_few), rows)


def _add_by_row(out: Tensor, x: Tensor, weights: LowRankWeights, rows: AdapterRows) -> None:
    num_rows, (_, max_rank, num_pieces, width), num_columns = len(x), weights.down.shape, out.shape[1]
    assert x.stride(1) == 1 and out.stride(1) == 1 and num_pieces <= 3
    small = torch.empty((num_rows, num_pieces, max_rank), dtype=x.dtype)
    chosen = (rows.indexes, weights.ranks, max_rank, num_pieces)
    tasks_per_row = -(-max_rank // _RANKS)
    num_tasks = num_rows * tasks_per_row
    _shrink(x, weights.down, small, *chosen, x.stride(0), width, tasks_per_row, num_tasks, num_tasks=num_tasks)
    first, second = weights.piece_sizes[0], sum(weights.piece_sizes[:2])  # where pieces end
    tasks_per_row = -(-num_columns // _COLUMNS)
    num_tasks = num_rows * tasks_per_row
    _expand(
        *(small, weights.up, out, *chosen, out.stride(0), num_columns, first, second),
        *(tasks_per_row, num_tasks),
        num_tasks=num_tasks,
    )


@inner
def _dot(x: Pointer, y: Pointer, length: int) -> float:
    sums = splat(np.float32(0))
    more = sums
    whole = length - length % (2 * LANES)
    for i in range(0, whole, 2 * LANES):
        sums = fma(load(x, i), load(y, i), sums)
        more = fma(load(x, i + LANES), load(y, i + LANES), more)
    if whole + LANES <= length:
        sums = fma(load(x, whole), load(y, whole), sums)
        whole += LANES
    result: float = total(add(sums, more))
    for i in range(whole, length):
        result += x[i] * y[i]
    return result


@kernel(
    x="pointer",
    down="pointer",
    small="pointer",
    indexes="pointer",
    ranks="pointer",
    max_rank="integer",
    num_pieces="integer",
    stride="integer",
    width="integer",
    tasks_per_row="integer",
    num_tasks="integer",
)
def _shrink(pointer: Pointer) -> None:
    a = arguments_at(pointer)
    x, down, small, width, num_pieces = floats(a.x), floats(a.down), floats(a.small), a.width, a.num_pieces
    indexes, ranks = int32s(a.indexes), int32s(a.ranks)
    task = claim(pointer)
    while task < a.num_tasks:
        row, first = task // a.tasks_per_row, task % a.tasks_per_row * _RANKS
        adapter = indexes[row] - 1
        if adapter >= 0:
            for r in range(first, min(first + _RANKS, ranks[adapter])):
                for piece in range(num_pieces):
                    matrix = after(down, ((adapter * a.max_rank + r) * num_pieces + piece) * width)
                    small[(row * num_pieces + piece) * a.max_rank + r] = _dot(after(x, row * a.stride), matrix, width)
        task = claim(pointer)


@kernel(
    small="pointer",
    up="pointer",
    out="pointer",
    indexes="pointer",
    ranks="pointer",
    max_rank="integer",
    num_pieces="integer",
    stride="integer",
    num_columns="integer",
    first="integer",
    second="integer",
    tasks_per_row="integer",
    num_tasks="integer",
)
def _expand(pointer: Pointer) -> None:
    a = arguments_at(pointer)
    small, up, out = floats(a.small), floats(a.up), floats(a.out)
    indexes, ranks = int32s(a.indexes), int32s(a.ranks)
    task = claim(pointer)
    while task < a.num_tasks:
        row, start = task // a.tasks_per_row, task % a.tasks_per_row * _COLUMNS
        adapter = indexes[row] - 1
        if adapter >= 0 and ranks[adapter]:
            for n in range(start, min(start + _COLUMNS, a.num_columns)):
                piece = int(n >= a.first) + int(n >= a.second)
                of_row = after(small, (row * a.num_pieces + piece) * a.max_rank)
                of_column = after(up, (adapter * a.num_columns + n) * a.max_rank)
                out[row * a.stride + n] += _dot(of_row, of_column, ranks[adapter])
        task = claim(pointer)
