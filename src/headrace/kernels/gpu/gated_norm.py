"""RMS norm of groups of columns with a SiLU gate before or after it, one program per token and group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def gated_norm(
    x: Tensor,  # [T, I], columns contiguous
    gate: Tensor,  # [T, I], columns contiguous
    weight: Tensor | None,  # [I], or [group_size] for all groups
    eps: float,
    *,
    group_size: int,
    norm_first: bool,
) -> Tensor:  # [T, I]
    num_tokens, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    block = triton.next_power_of_2(group_size)
    _gated_norm[(num_tokens, width // group_size)](
        x,
        gate,
        x if weight is None else weight,
        out,
        x.stride(0),
        gate.stride(0),
        out.stride(0),
        0 if weight is None or len(weight) < width else group_size,
        group_size,
        eps,
        HAS_NORM=weight is not None,
        NORM_FIRST=norm_first,
        BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
    )
    return out


@triton.jit
def _gated_norm(
    x,
    gate,
    weight,
    out,
    x_stride,
    gate_stride,
    out_stride,
    weight_stride,
    group_size,
    eps,
    HAS_NORM: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < group_size
    places = group * group_size + columns
    wide = tl.load(x + token * x_stride + places, mask=inside, other=0.0).to(tl.float32)
    opened = tl.load(gate + token * gate_stride + places, mask=inside, other=0.0).to(tl.float32)
    opened = opened * tl.sigmoid(opened)
    if not NORM_FIRST:
        wide = wide * opened
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / group_size + eps)
        gain = tl.load(weight + group * weight_stride + columns, mask=inside, other=0.0).to(tl.float32)
        wide = wide * scale * gain
    if NORM_FIRST:
        wide = wide * opened
    tl.store(out + token * out_stride + places, wide.to(out.dtype.element_ty), mask=inside)
