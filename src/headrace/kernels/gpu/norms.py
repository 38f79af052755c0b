"""RMS norm of a token a program, alone or fused with the addition to the residual stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [T, H], [H] -> [T, H]
    out = torch.empty_like(x)
    _launch(x, None, weight, out, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x to `residual` in place and returns the norm of the sum. All [T, H]."""
    out = torch.empty_like(x)
    _launch(x, residual, weight, out, eps)
    return out


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    num_tokens, hidden_size = x.shape
    if num_tokens == 0:
        return
    block = triton.next_power_of_2(hidden_size)
    _norm[(num_tokens,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(0),
        hidden_size,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
    )


@triton.jit
def _norm(x, residual, weight, out, x_stride, hidden_size, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden_size
    line = tl.load(x + token * x_stride + columns, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        # The sum is rounded to the residual's type before it is normed, as the twin does.
        stream = residual + token * hidden_size + columns
        line = line.to(tl.float32) + tl.load(stream, mask=inside, other=0.0).to(tl.float32)
        line = line.to(out.dtype.element_ty)
        tl.store(stream, line, mask=inside)
    wide = line.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / hidden_size + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * hidden_size + columns, (wide * scale * gain).to(out.dtype.element_ty), mask=inside)
