"""The gated activation of the feed-forward half."""

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
