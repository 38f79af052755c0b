"""A matrix of four bits in memory (see `int4.py` for its form), and how kernels widen its weights in registers, two in
two instructions."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Int4Matrix(NamedTuple):
    packed: Tensor  # [K / 128, N, 16] int32
    scales: Tensor  # [groups, N] float32; with zero points, these are the last five bits (`zero_of`)
    has_zeros: bool
    width: int  # K
    groups: int  # of 128 weights: 1, 2 or 4
    arrivals: Tensor  # int32, one per tile or more, zeros before and after each kernel

    @property
    def num_columns(self) -> int:
        return self.packed.shape[1]


def with_zeros(scales: Tensor, zeros: Tensor) -> Tensor:
    """Puts zero points, 0 to 16, into the last five bits of float32 scales, so that one load gets both. A scale is
    rounded for that, by at most 2**-19 of it."""
    rounded = (scales.float().view(torch.int32) + 16) & ~31
    return (rounded | zeros.int()).view(torch.float32)


@triton.jit
def zero_of(scales):
    return scales.to(tl.int32, bitcast=True) & 31


@triton.jit
def scale_of(scales):
    return (scales.to(tl.int32, bitcast=True) & -32).to(tl.float32, bitcast=True)


# A pair of values in the low bits of two floats, then minus the zero point: two instructions for two weights. The
# compiler would take five. `fma` by one, since older GPUs have no subtraction of bfloat16.
_BF16_PAIR: tl.constexpr = tl.constexpr(
    "{ .reg .b32 t, one; mov.b32 one, 0x3f803f80; lop3.b32 t, $2, 0x000f000f, 0x43004300, 0xea; "
    "fma.rn.bf16x2 t, t, one, $3; mov.b32 {$0, $1}, t; }"
)
_FP16_PAIR: tl.constexpr = tl.constexpr(
    "{ .reg .b32 t, one; mov.b32 one, 0x3c003c00; lop3.b32 t, $2, 0x000f000f, 0x64006400, 0xea; "
    "fma.rn.f16x2 t, t, one, $3; mov.b32 {$0, $1}, t; }"
)


@triton.jit
def value_pairs(words, zero, PAIR: tl.constexpr, DTYPE: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Widens pair number PAIR of every word and subtracts the zero point: [..., W] -> [..., W, 2]."""
    shifted = words >> (4 * PAIR)
    if IS_INTERPRETED:
        lower, upper = (shifted & 15).to(tl.float32) - zero, ((shifted >> 16) & 15).to(tl.float32) - zero
        return tl.join(lower.to(DTYPE), upper.to(DTYPE))
    elif DTYPE == tl.bfloat16:
        lower, upper = tl.inline_asm_elementwise(
            _BF16_PAIR, "=h,=h,r,r", [shifted, zero], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1
        )
        return tl.join(lower, upper)
    else:
        lower, upper = tl.inline_asm_elementwise(
            _FP16_PAIR, "=h,=h,r,r", [shifted, zero], dtype=(tl.float16, tl.float16), is_pure=True, pack=1
        )
        return tl.join(lower, upper)


@triton.jit
def zero_pairs(zero, DTYPE: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Returns zero points as `value_pairs` takes them: a pair of negative floats with the offset of the values."""
    if IS_INTERPRETED:
        return zero.to(tl.float32)
    else:
        if DTYPE == tl.bfloat16:
            zero += 0xC300
        else:
            zero += 0xE400
        return zero | (zero << 16)
