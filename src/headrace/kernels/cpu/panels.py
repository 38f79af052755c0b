"""What all GEMMs of this package share: how weights and rows are divided, and the loops that they emit.

    panel   PANEL outputs whose weights are stored together, the outputs innermost
    tile    up to TILE_ROWS rows times one panel: its sums stay in registers while the panel is read once
    task    some panels times a block of up to ROW_BLOCK rows, claimed by one thread

A GEMM of few rows is one pass over the weights, as that of a single row. Sums are added in the same order for any
number of rows and threads, so a row's result does not depend on the batch.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from llvmlite import ir
from torch import Tensor

from headrace.kernels.cpu.native import Pointer, after, inner
from headrace.kernels.cpu.vectors import FEATURES, LANES

# Registers and instructions are chosen for x86. Elsewhere torch's own GEMM is used.
IS_SUPPORTED = platform.machine() in ("x86_64", "AMD64") and bool(
    FEATURES.get("avx2") and FEATURES.get("fma") and FEATURES.get("f16c") and (LANES == 8 or FEATURES.get("avx512bw"))
)

T = TypeVar("T")
Step: TypeAlias = Callable[[ir.Value, list[ir.Value]], list[ir.Value]]  # of a loop: takes k and the sums so far

NUM_VECTORS = 3
PANEL = NUM_VECTORS * LANES
TILE_ROWS = 8 if LANES == 16 else 4  # sums take 24 of the 32 registers of AVX-512, 12 of the 16 of AVX2
ROW_BLOCK = 64
TASKS_PER_THREAD = 8  # a slow core takes fewer of them
SIZE = ir.IntType(64)


class Tasks(NamedTuple):
    row_block: int
    panels_per_task: int
    tasks_per_block: int  # of rows
    num_tasks: int


def tasks_of(num_rows: int, num_panels: int, max_rows: int = ROW_BLOCK) -> Tasks:
    """Divides a GEMM into tasks of up to so many rows."""
    num_blocks = -(-num_rows // max_rows)
    rows = -(-num_rows // num_blocks)
    panels_per_task = max(1, num_panels * num_blocks // (TASKS_PER_THREAD * torch.get_num_threads()))
    tasks_per_block = -(-num_panels // panels_per_task)
    row_block = -(-rows // TILE_ROWS) * TILE_ROWS
    return Tasks(row_block, panels_per_task, tasks_per_block, -(-num_rows // row_block) * tasks_per_block)


def as_panels(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:  # [N, K] -> [panels, K, PANEL]
    """`dtype`: None: that of the matrix. The outputs past the last one are zeros."""
    num_out, depth = matrix.shape
    num_whole = num_out // PANEL
    panels = torch.empty(-(-num_out // PANEL), depth, PANEL, dtype=dtype or matrix.dtype)
    panels[:num_whole].copy_(matrix[: num_whole * PANEL].unflatten(0, (num_whole, PANEL)).transpose(1, 2))
    if num_whole < len(panels):
        panels[-1].zero_()[:, : num_out % PANEL].copy_(matrix[num_whole * PANEL :].t())
    return panels


def padded(values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:  # [N] -> [panels * PANEL]
    """Appends zeros, so that the last panel has a value for each of its outputs."""
    return torch.nn.functional.pad(values.detach().to(dtype), (0, -len(values) % PANEL)).contiguous()


@inner
def copy_panel(sums: Pointer, out: Pointer, panel: int, first_row: int, num_rows: int, num_out: int) -> None:
    """Copies the sums of a panel, [rows, PANEL], to its outputs. They are added up apart from these, whose rows may lie
    a power of two apart: more than a few of them would not stay in the L1 cache."""
    num_columns = min(PANEL, num_out - panel * PANEL)
    for row in range(num_rows):
        target = after(out, (first_row + row) * num_out + panel * PANEL)
        for column in range(num_columns):
            target[column] = sums[row * PANEL + column]


def emit_choice(
    builder: ir.IRBuilder, value: ir.Value, cases: Mapping[int, Callable[[], T]]
) -> list[tuple[T, ir.Block]]:
    """Emits the code of each case and the choice between them; the last case is also for all other values. Returns what
    each function returned, and the block in which its code ends."""
    blocks = [builder.append_basic_block(f"case{number}") for number in cases]
    end = builder.append_basic_block("chosen")
    choice = builder.switch(value, blocks[-1])
    for number, block in zip(list(cases)[:-1], blocks, strict=False):
        choice.add_case(SIZE(number), block)
    results = []
    for emit, block in zip(cases.values(), blocks, strict=True):
        builder.position_at_end(block)
        results.append((emit(), builder.block))
        builder.branch(end)
    builder.position_at_end(end)
    return results


def emit_for_rows(builder: ir.IRBuilder, num_rows: ir.Value, emit: Callable[[int], None]) -> None:
    """Emits code for each number of rows that a tile may have."""
    emit_choice(builder, num_rows, {count: partial(emit, count) for count in range(1, TILE_ROWS + 1)})


def emit_sums(
    builder: ir.IRBuilder,
    depth: ir.Value,
    zeros: list[ir.Value],
    step: Step,
) -> list[ir.Value]:
    """Emits a loop over k from 0 to `depth`, at least once, with all sums in registers. `step` emits the instructions
    of one k: it takes k and the sums so far, and returns the new ones."""
    before, loop, end = builder.block, builder.append_basic_block("k"), builder.append_basic_block("summed")
    builder.branch(loop)
    builder.position_at_end(loop)
    k, sums = builder.phi(SIZE), [builder.phi(zero.type) for zero in zeros]
    results = [builder.add(k, SIZE(1)), *step(k, sums)]
    for phi, first, result in zip([k, *sums], [SIZE(0), *zeros], results, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(result, builder.block)
    builder.cbranch(builder.icmp_signed("<", results[0], depth), loop, end)
    builder.position_at_end(end)
    return results[1:]
