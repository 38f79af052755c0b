"""Activations of the MLP, and the soft cap of logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.dependent_launch import dependent_launch, wait_for_inputs
from headrace.kernels.gpu.fp8 import empty_fp8_rows, quantize_rows, store_fp8_row
from headrace.kernels.layout import Fp8Rows
from headrace.kernels.reference import clamped_silu_and_mul, gelu, gelu_tanh, relu, relu2

_BLOCK = 2048
ACTIVATIONS = {None: 0, "silu": 1, "gelu_tanh": 2}  # that `gate` applies


def silu_and_mul(gate_up: Tensor) -> Tensor:  # [T, 2 * I] -> [T, I]
    return _gated(gate_up, is_gelu=False)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:  # [T, 2 * I] -> [T, I]
    return _gated(gate_up, is_gelu=True)


def silu_and_mul_fp8(gate_up: Tensor) -> Fp8Rows:  # [T, 2 * I] -> [T, I]
    return _gated_fp8(gate_up, is_gelu=False)


def gelu_tanh_and_mul_fp8(gate_up: Tensor) -> Fp8Rows:  # [T, 2 * I] -> [T, I]
    return _gated_fp8(gate_up, is_gelu=True)


def clamped_silu_and_mul_fp8(gate_up: Tensor) -> Fp8Rows:  # [T, 2 * I] -> [T, I]
    return quantize_rows(clamped_silu_and_mul(gate_up))


def gelu_fp8(x: Tensor) -> Fp8Rows:  # [T, I]
    return quantize_rows(gelu(x))


def gelu_tanh_fp8(x: Tensor) -> Fp8Rows:  # [T, I]
    return quantize_rows(gelu_tanh(x))


def relu_fp8(x: Tensor) -> Fp8Rows:  # [T, I]
    return quantize_rows(relu(x))


def relu2_fp8(x: Tensor) -> Fp8Rows:  # [T, I]
    return quantize_rows(relu2(x))


def _gated(gate_up: Tensor, *, is_gelu: bool) -> Tensor:
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        _gate[(num_tokens, triton.cdiv(width, _BLOCK))](
            gate_up, out, width, IS_GELU=is_gelu, BLOCK=_BLOCK, num_warps=4, **dependent_launch(gate_up.device)
        )
    return out


def _gated_fp8(gate_up: Tensor, *, is_gelu: bool) -> Fp8Rows:
    """Runs one program per token: the scale is that of the whole row."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty_fp8_rows(num_tokens, width, gate_up.device)
    if num_tokens:
        block = triton.next_power_of_2(width)
        _gate_fp8[(num_tokens,)](
            gate_up,
            out.values,
            out.scales,
            width,
            IS_GELU=is_gelu,
            BLOCK=block,
            num_warps=min(16, max(4, block // 1024)),
        )
    return out


@triton.jit
def _gated_columns(gate_up, token, columns, width, IS_GELU: tl.constexpr):
    inside = columns < width
    gate = tl.load(gate_up + token * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * width + width + columns, mask=inside, other=0.0)
    if IS_GELU:
        bend = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # (1 + tanh(bend / 2)) / 2 = sigmoid(bend)
    else:
        bend = gate
    # Rounded before the multiplication, as in the reference.
    return (gate * tl.sigmoid(bend)).to(gate_up.dtype.element_ty) * up


@triton.jit
def _gate(gate_up, out, width, IS_GELU: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    wait_for_inputs(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gated = _gated_columns(gate_up, token, columns, width, IS_GELU)
    tl.store(out + token * width + columns, gated, mask=columns < width)


@triton.jit
def _gate_fp8(gate_up, out, scales, width, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    gated = _gated_columns(gate_up, token, columns, width, IS_GELU)
    store_fp8_row(out + token * width, scales + token, gated, columns, columns < width)


@triton.jit
def gate(gate_sums, up_sums, out, ACTIVATION: tl.constexpr):
    """Applies the activation to the gate and multiplies by up, with the roundings of the reference."""
    element = out.dtype.element_ty
    bend = gate_sums.to(element).to(tl.float32)
    gated = bend
    if ACTIVATION == 2:
        bend = 1.5957691216057308 * (gated + 0.044715 * gated * gated * gated)
    return (gated * tl.sigmoid(bend)).to(element) * up_sums.to(element)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in place."""
    assert x.is_contiguous()
    if x.numel():
        _soft_cap[(triton.cdiv(x.numel(), _BLOCK),)](x, cap, x.numel(), BLOCK=_BLOCK, num_warps=4)
    return x


@triton.jit(do_not_specialize=["length"])
def _soft_cap(x, cap, length, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < length
    value = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    tanh = 2.0 * tl.sigmoid(2.0 * value / cap) - 1.0
    tl.store(x + places, (cap * tanh).to(x.dtype.element_ty), mask=inside)
