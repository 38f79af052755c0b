"""Activations of MLPs, alone or multiplied by a second half."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.layout import Fp8Rows
from headrace.kernels.reference.fp8 import quantize_rows

CLAMP = 7.0  # of gpt-oss: the gate has this maximum, the other half this size
CLAMPED_SILU_SLOPE = 1.702


def silu_and_mul(gate_up: Tensor) -> Tensor:  # [T, 2 * I] -> [T, I]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:  # [T, 2 * I] -> [T, I]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def gelu_and_mul(gate_up: Tensor) -> Tensor:  # [T, 2 * I] -> [T, I]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate).mul_(up)


def clamped_silu_and_mul(gate_up: Tensor) -> Tensor:  # [T, 2 * I] -> [T, I]
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(CLAMPED_SILU_SLOPE * gate) * (up + 1)


def clamped_silu_and_mul_fp8(gate_up: Tensor) -> Fp8Rows:
    return quantize_rows(clamped_silu_and_mul(gate_up))


def silu_and_mul_fp8(gate_up: Tensor) -> Fp8Rows:
    return quantize_rows(silu_and_mul(gate_up))


def gelu_tanh_and_mul_fp8(gate_up: Tensor) -> Fp8Rows:
    return quantize_rows(gelu_tanh_and_mul(gate_up))


def gelu(x: Tensor) -> Tensor:  # [T, I]
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:  # [T, I]
    return F.gelu(x, approximate="tanh")


def relu(x: Tensor) -> Tensor:  # [T, I]
    return torch.relu(x)


def relu2(x: Tensor) -> Tensor:  # [T, I]
    return torch.relu(x).square()


def relu_fp8(x: Tensor) -> Fp8Rows:
    return quantize_rows(relu(x))


def relu2_fp8(x: Tensor) -> Fp8Rows:
    return quantize_rows(relu2(x))


def gelu_fp8(x: Tensor) -> Fp8Rows:
    return quantize_rows(gelu(x))


def gelu_tanh_fp8(x: Tensor) -> Fp8Rows:
    return quantize_rows(gelu_tanh(x))
