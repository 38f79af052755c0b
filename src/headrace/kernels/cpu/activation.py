"""Gated activations of the MLP."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.kernels.cpu.launch import Kernel, arguments_at, claim, kernel
from headrace.kernels.cpu.native import Pointer, floats
from headrace.kernels.cpu.vectors import LANES, add, divide, exp, fma, load, multiply, splat, store, subtract

_TASK_FLOATS = 4096
_BEND = 2.0 * math.sqrt(2.0 / math.pi)
_CUBE = 0.044715


def silu_and_mul(gate_up: Tensor) -> Tensor:  # [T, 2 * I] -> [T, I]
    return _run(_silu_and_mul, gate_up)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:  # [T, 2 * I] -> [T, I]
    return _run(_gelu_tanh_and_mul, gate_up)


def _run(activate: Kernel, gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype)
    rows_per_task = max(1, _TASK_FLOATS // width)
    num_tasks = -(-num_rows // rows_per_task)
    activate(gate_up, out, num_rows, width, rows_per_task, num_tasks, num_tasks=num_tasks)
    return out


@kernel(
    gate_up="pointer",
    out="pointer",
    num_rows="integer",
    width="integer",
    rows_per_task="integer",
    num_tasks="integer",
)
def _silu_and_mul(pointer: Pointer) -> None:
    a = arguments_at(pointer)
    gate_up, out, width = floats(a.gate_up), floats(a.out), a.width
    whole = width // LANES * LANES
    task = claim(pointer)
    while task < a.num_tasks:
        for row in range(task * a.rows_per_task, min((task + 1) * a.rows_per_task, a.num_rows)):
            gate, up, target = 2 * row * width, (2 * row + 1) * width, row * width
            for i in range(0, whole, LANES):
                x = load(gate_up, gate + i)
                sigmoid_inverse = add(splat(1.0), exp(subtract(splat(0.0), x)))
                store(out, target + i, multiply(divide(x, sigmoid_inverse), load(gate_up, up + i)))
            for i in range(whole, width):
                out[target + i] = gate_up[gate + i] / (1 + math.exp(-gate_up[gate + i])) * gate_up[up + i]
        task = claim(pointer)


@kernel(
    gate_up="pointer",
    out="pointer",
    num_rows="integer",
    width="integer",
    rows_per_task="integer",
    num_tasks="integer",
)
def _gelu_tanh_and_mul(pointer: Pointer) -> None:
    """Uses 1 + tanh(t) = 2 / (1 + exp(-2 t)): x / (1 + exp(-2 t)) with t = sqrt(2 / pi) * (x + 0.044715 * x**3)."""
    a = arguments_at(pointer)
    gate_up, out, width = floats(a.gate_up), floats(a.out), a.width
    whole = width // LANES * LANES
    task = claim(pointer)
    while task < a.num_tasks:
        for row in range(task * a.rows_per_task, min((task + 1) * a.rows_per_task, a.num_rows)):
            gate, up, target = 2 * row * width, (2 * row + 1) * width, row * width
            for i in range(0, whole, LANES):
                x = load(gate_up, gate + i)
                bend = multiply(x, fma(multiply(x, x), splat(-_BEND * _CUBE), splat(-_BEND)))
                share_inverse = add(splat(1.0), exp(bend))
                store(out, target + i, multiply(divide(x, share_inverse), load(gate_up, up + i)))
            for i in range(whole, width):
                y = gate_up[gate + i]
                bend_y = y * (y * y * (-_BEND * _CUBE) - _BEND)
                out[target + i] = y / (1 + math.exp(bend_y)) * gate_up[up + i]
        task = claim(pointer)
