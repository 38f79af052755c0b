"""RMS norm and LayerNorm, with or without the addition to the residual stream, and that addition alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.kernels.cpu.launch import arguments_at, claim, kernel
from headrace.kernels.cpu.native import Pointer, after, floats

_TASK_FLOATS = 8192  # enough work to be worth a claim


def add_to(residual: Tensor, x: Tensor) -> Tensor:
    """Adds x to `residual` in place and returns it. Both [T, H]."""
    if not (residual.is_contiguous() and x.is_contiguous() and residual.dtype == x.dtype == torch.float32):
        return residual.add_(x)
    num_tasks = -(-residual.numel() // _TASK_FLOATS)
    _add(x, residual, residual.numel(), num_tasks, num_tasks=num_tasks)
    return residual


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


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:  # [T, H], [H], [H] -> [T, H]
    return _layer_norm(x.contiguous(), None, weight, bias, eps)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Adds x to `residual` in place and returns the norm of the sum. All [T, H]."""
    if not residual.is_contiguous():
        residual += x
        return layer_norm(residual, weight, bias, eps)
    return _layer_norm(x.contiguous(), residual, weight, bias, eps)


def _layer_norm(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    assert all(each.dtype == x.dtype and each.is_contiguous() for each in (weight, bias))
    assert residual is None or residual.dtype == x.dtype
    out = torch.empty_like(x)
    num_rows, width = x.shape
    rows_per_task = max(1, _TASK_FLOATS // width)
    num_tasks = -(-num_rows // rows_per_task)
    stream = 0 if residual is None else residual
    _centre_and_normalise(
        x, stream, weight, bias, out, num_rows, width, rows_per_task, num_tasks, eps, num_tasks=num_tasks
    )
    return out


@kernel(x="pointer", residual="pointer", num_elements="integer", num_tasks="integer")
def _add(pointer: Pointer) -> None:
    a = arguments_at(pointer)
    x, residual = floats(a.x), floats(a.residual)
    task = claim(pointer)
    while task < a.num_tasks:
        for i in range(task * _TASK_FLOATS, min((task + 1) * _TASK_FLOATS, a.num_elements)):
            residual[i] += x[i]
        task = claim(pointer)


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


@kernel(
    x="pointer",
    residual="pointer",  # 0: nothing is added
    weight="pointer",
    bias="pointer",
    out="pointer",
    num_rows="integer",
    width="integer",
    rows_per_task="integer",
    num_tasks="integer",
    eps="float",
)
def _centre_and_normalise(pointer: Pointer) -> None:
    a = arguments_at(pointer)
    x, weight, bias, out, width = floats(a.x), floats(a.weight), floats(a.bias), floats(a.out), a.width
    task = claim(pointer)
    while task < a.num_tasks:
        for row in range(task * a.rows_per_task, min((task + 1) * a.rows_per_task, a.num_rows)):
            line = after(x, row * width)
            if a.residual != 0:
                line = after(floats(a.residual), row * width)
                for i in range(width):
                    line[i] += x[row * width + i]
            total = a.eps * 0
            for i in range(width):
                total += line[i]
            mean = total / width
            squares = a.eps * 0
            for i in range(width):
                squares += (line[i] - mean) * (line[i] - mean)
            scale = 1 / math.sqrt(squares / width + a.eps)
            for i in range(width):
                out[row * width + i] = (line[i] - mean) * scale * weight[i] + bias[i]
        task = claim(pointer)
