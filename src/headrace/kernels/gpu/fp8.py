"""FP8 (e4m3) quantization and scaled GEMMs: the place to start for `quantization="fp8"`.

Scales are float32, and value = fp8 value * scale. A row's scale is its largest absolute value / 448 (`store_fp8_row`).

    weights       one scale per output channel, computed once at load (`fp8_linear.Fp8Linear`, `experts.PackedExperts`)
    activations   one scale per row (token), computed by the kernel that produces the row: `norms.py`, `activation.py`;
                  `quantize_rows` here quantizes rows that come in the model's own type
    applied       after the sums of the GEMM, which are in float32: `fp8_linear.py`, `experts.py` for experts
    KV cache      values in float8 without scales, keys in e3m4 (`e3m4.py`); `rope.py` stores them, attention widens
                  them to float16 (`attention_loop.py`)

`layout.Fp8Rows` carries quantized rows with their scales. `PackedLinear.prefers_fp8` tells `models/layers.py` whether
the norm or activation before a linear layer should return them: up to 16 rows keep their type (`few_rows.py`).
`kernels/reference/` has the same arithmetic, for any number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.layout import Fp8Rows
from headrace.kernels.reference import FP8

FP8_LIMIT: tl.constexpr = tl.constexpr(448.0)


def empty_fp8_rows(num_rows: int, width: int, device: torch.device) -> Fp8Rows:
    return Fp8Rows(
        torch.empty((num_rows, width), dtype=FP8, device=device),
        torch.empty((num_rows, 1), dtype=torch.float32, device=device),
    )


def quantize_rows(x: Tensor) -> Fp8Rows:  # [T, K]
    """Quantizes each row with its own scale."""
    num_rows, width = x.shape
    out = empty_fp8_rows(num_rows, width, x.device)
    if num_rows:
        block = triton.next_power_of_2(width)
        _quantize[(num_rows,)](
            x, out.values, out.scales, width, x.stride(0), BLOCK=block, num_warps=min(16, max(1, block // 1024))
        )
    return out


@triton.jit
def _quantize(x, out, scales, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    line = tl.load(x + row * stride + columns, mask=inside, other=0.0)
    store_fp8_row(out + row * width, scales + row, line, columns, inside)


@triton.jit
def store_fp8_row(out, scale_at, line, columns, inside):
    """Computes the scale of one row and stores the row in FP8; `line` must be zero where it is not inside."""
    wide = line.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), axis=0), 1e-12) / FP8_LIMIT
    tl.store(scale_at, scale)
    tl.store(out + columns, (wide / scale).to(out.dtype.element_ty), mask=inside)
