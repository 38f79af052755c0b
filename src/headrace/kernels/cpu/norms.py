"""RMS norm, alone and with the addition to the residual stream before it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.kernels.cpu.launch import Pointer, arguments_at, claim, floats, kernel

_TASK_FLOATS = 8192  # enough work to be worth a claim


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [T, H], [H] -> [T, H]
    assert weight.dtype == x.dtype and weight.is_contiguous()
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    num_rows = x.numel() // width
    rows_per_task = max(1, _TASK_FLOATS // width)
    num_tasks = -(-num_rows // rows_per_task)
    _normalise(x, weight, out, num_rows, width, rows_per_task, num_tasks, eps, num_tasks=num_tasks)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x to `residual` in place and returns the norm of the sum. All [T, H]."""
    if not residual.is_contiguous():
        residual += x
        return rms_norm(residual, weight, eps)
    assert weight.dtype == x.dtype == residual.dtype and weight.is_contiguous()
    x = x.contiguous()
    out = torch.empty_like(x)
    num_rows, width = x.shape
    rows_per_task = max(1, _TASK_FLOATS // width)
    num_tasks = -(-num_rows // rows_per_task)
    _add_and_normalise(x, residual, weight, out, num_rows, width, rows_per_task, num_tasks, eps, num_tasks=num_tasks)
    return out


@kernel(
    x="pointer",
    weight="pointer",
    out="pointer",
    num_rows="integer",
    width="integer",
    rows_per_task="integer",
    num_tasks="integer",
    eps="float",
)
def _normalise(pointer: Pointer) -> None:
    a = arguments_at(pointer)
    x, weight, out, width = floats(a.x), floats(a.weight), floats(a.out), a.width
    task = claim(pointer)
    while task < a.num_tasks:
        for row in range(task * a.rows_per_task, min((task + 1) * a.rows_per_task, a.num_rows)):
            squares = a.eps * 0
            for i in range(row * width, (row + 1) * width):
                squares += x[i] * x[i]
            scale = 1 / math.sqrt(squares / width + a.eps)
            for i in range(width):
                out[row * width + i] = x[row * width + i] * scale * weight[i]
        task = claim(pointer)


@kernel(
    x="pointer",
    residual="pointer",
    weight="pointer",
    out="pointer",
    num_rows="integer",
    width="integer",
    rows_per_task="integer",
    num_tasks="integer",
    eps="float",
)
def _add_and_normalise(pointer: Pointer) -> None:
    a = arguments_at(pointer)
    x, residual, weight, out, width = floats(a.x), floats(a.residual), floats(a.weight), floats(a.out), a.width
    task = claim(pointer)
    while task < a.num_tasks:
        for row in range(task * a.rows_per_task, min((task + 1) * a.rows_per_task, a.num_rows)):
            squares = a.eps * 0
            for i in range(row * width, (row + 1) * width):
                total = residual[i] + x[i]
                residual[i] = total
                squares += total * total
            scale = 1 / math.sqrt(squares / width + a.eps)
            for i in range(width):
                out[row * width + i] = residual[row * width + i] * scale * weight[i]
        task = claim(pointer)
