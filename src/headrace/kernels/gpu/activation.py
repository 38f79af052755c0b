"""The gated activations of the feed-forward half, and the soft cap of logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


def silu_and_mul(gate_up: Tensor) -> Tensor:  # [T, 2 * I] -> [T, I]
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        _silu_and_mul[(num_tokens, triton.cdiv(width, _BLOCK))](gate_up, out, width, BLOCK=_BLOCK, num_warps=4)
    return out


@triton.jit
def _silu_and_mul(gate_up, out, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + token * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * width + width + columns, mask=inside, other=0.0)
    activated = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty)  # rounded before the product, as the twin does
    tl.store(out + token * width + columns, activated * up, mask=inside)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:  # [T, 2 * I] -> [T, I]
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        _gelu_tanh_and_mul[(num_tokens, triton.cdiv(width, _BLOCK))](gate_up, out, width, BLOCK=_BLOCK, num_warps=4)
    return out


@triton.jit
def _gelu_tanh_and_mul(gate_up, out, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + token * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * width + width + columns, mask=inside, other=0.0)
    bend = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # (1 + tanh(bend / 2)) / 2 = sigmoid(bend)
    activated = (gate * tl.sigmoid(bend)).to(out.dtype.element_ty)  # rounded before the product, as the twin does
    tl.store(out + token * width + columns, activated * up, mask=inside)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in place."""
    assert x.is_contiguous()
    if x.numel():
        _soft_cap[(triton.cdiv(x.numel(), _BLOCK),)](x, cap, x.numel(), BLOCK=_BLOCK, num_warps=4)
    return x


@triton.jit
def _soft_cap(x, cap, length, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < length
    value = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    tanh = 2.0 * tl.sigmoid(2.0 * value / cap) - 1.0
    tl.store(x + places, (cap * tanh).to(x.dtype.element_ty), mask=inside)
