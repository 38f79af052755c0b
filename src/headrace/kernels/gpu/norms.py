"""RMS norm and LayerNorm, one program per token, with or without the addition to the residual stream, in the input's
type or FP8. What is added may be the rows of each token's routes, which are summed first."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.dependent_launch import dependent_launch, wait_for_inputs
from headrace.kernels.gpu.fp8 import empty_fp8_rows, store_fp8_row
from headrace.kernels.gpu.route_rows import sum_of_token
from headrace.kernels.layout import Addend, Fp8Rows, RouteRows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [T, H], [H] -> [T, H]
    out = torch.empty_like(x)
    _launch(x, None, weight, None, out, None, eps)
    return out


def add_rms_norm(x: Addend, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x to `residual` in place and returns the norm of the sum. All [T, H]."""
    out = torch.empty_like(residual)
    _launch(x, residual, weight, None, out, None, eps)
    return out


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
    out = empty_fp8_rows(x.shape[0], x.shape[1], x.device)
    _launch(x, None, weight, None, out.values, out.scales, eps)
    return out


def add_rms_norm_fp8(x: Addend, residual: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
    out = empty_fp8_rows(residual.shape[0], residual.shape[1], residual.device)
    _launch(x, residual, weight, None, out.values, out.scales, eps)
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:  # [T, H], [H], [H] -> [T, H]
    out = torch.empty_like(x)
    _launch(x, None, weight, bias, out, None, eps)
    return out


def add_layer_norm(x: Addend, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Adds x to `residual` in place and returns the norm of the sum. All [T, H]."""
    out = torch.empty_like(residual)
    _launch(x, residual, weight, bias, out, None, eps)
    return out


def layer_norm_fp8(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Fp8Rows:
    out = empty_fp8_rows(x.shape[0], x.shape[1], x.device)
    _launch(x, None, weight, bias, out.values, out.scales, eps)
    return out


def add_layer_norm_fp8(x: Addend, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Fp8Rows:
    out = empty_fp8_rows(residual.shape[0], residual.shape[1], residual.device)
    _launch(x, residual, weight, bias, out.values, out.scales, eps)
    return out


def _launch(
    x: Addend,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,  # None: RMS norm
    out: Tensor,
    scales: Tensor | None,
    eps: float,
) -> None:
    rows, num_chosen = (x.rows, x.num_chosen) if isinstance(x, RouteRows) else (x, 1)
    num_tokens, hidden_size = rows.shape[0] // num_chosen, rows.shape[1]
    if num_tokens == 0:
        return
    block = triton.next_power_of_2(hidden_size)
    _norm[(num_tokens,)](
        rows,
        rows if residual is None else residual,
        weight,
        weight if bias is None else bias,
        out,
        rows if scales is None else scales,
        rows.stride(0),
        hidden_size,
        eps,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        IS_FP8=scales is not None,
        NUM_CHOSEN=num_chosen,
        BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
        **dependent_launch(rows.device),
    )


@triton.jit
def _norm(
    x,
    residual,
    weight,
    bias,
    out,
    scales,
    x_stride,
    hidden_size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_FP8: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_inputs(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden_size
    line = sum_of_token(x + token * NUM_CHOSEN * x_stride, x_stride, columns, inside, NUM_CHOSEN)
    if HAS_RESIDUAL:
        # The sum is rounded to the residual's type before it is normed, as in the reference.
        stream = residual + token * hidden_size + columns
        line = line.to(tl.float32) + tl.load(stream, mask=inside, other=0.0).to(tl.float32)
        line = line.to(x.dtype.element_ty)
        tl.store(stream, line, mask=inside)
    wide = line.to(tl.float32)
    if HAS_BIAS:
        wide = tl.where(inside, wide - tl.sum(wide) / hidden_size, 0.0)
    scale = tl.rsqrt(tl.sum(wide * wide) / hidden_size + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normed = wide * scale * gain
    if HAS_BIAS:
        normed += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    normed = normed.to(x.dtype.element_ty)
    if IS_FP8:
        store_fp8_row(out + token * hidden_size, scales + token, normed, columns, inside)
    else:
        tl.store(out + token * hidden_size + columns, normed, mask=inside)
