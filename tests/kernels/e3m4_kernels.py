"""Kernels that only round to e3m4 or widen, for `test_e3m4.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.gpu.e3m4 import encode_e3m4, widen_e3m4


@triton.jit
def encode(x, codes, length, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(codes + at, encode_e3m4(tl.load(x + at, mask=at < length, other=0.0)), mask=at < length)


@triton.jit
def widen(codes, wide, BLOCK: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(wide + at, widen_e3m4(tl.load(codes + at), IS_INTERPRETED))
