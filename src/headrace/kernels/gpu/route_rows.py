"""Sums the rows of each token's routes, in a kernel of their own or as a part of the norm after them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.dependent_launch import dependent_launch, wait_for_inputs
from headrace.kernels.layout import RouteRows

_BLOCK = 512


def sum_routes(x: RouteRows) -> Tensor:  # -> [T, H]
    """See `ops.sum_routes`."""
    num_tokens, width = x.num_tokens, x.rows.shape[1]
    out = torch.empty((num_tokens, width), dtype=x.rows.dtype, device=x.rows.device)
    if num_tokens:
        _sum_routes[(num_tokens, triton.cdiv(width, _BLOCK))](
            x.rows,
            out,
            width,
            NUM_CHOSEN=x.num_chosen,
            BLOCK=_BLOCK,
            num_warps=2,
            **dependent_launch(out.device),
        )
    return out


@triton.jit
def _sum_routes(x, out, width, NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    wait_for_inputs(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = sum_of_token(x + token * NUM_CHOSEN * width, width, columns, columns < width, NUM_CHOSEN)
    tl.store(out + token * width + columns, total, mask=columns < width)


@triton.jit
def sum_of_token(rows, stride, columns, inside, NUM_CHOSEN: tl.constexpr):
    """Returns the sum of a token's rows in their type. It is always added up in this order, so that it is the same
    whichever kernel needs it."""
    total = tl.load(rows + columns, mask=inside, other=0.0).to(tl.float32)
    for choice in tl.static_range(1, NUM_CHOSEN):
        total += tl.load(rows + choice * stride + columns, mask=inside, other=0.0).to(tl.float32)
    return total.to(rows.dtype.element_ty)
