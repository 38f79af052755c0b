"""Logits as integers of the same order: 16 bits for a bfloat16, 32 for a float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # low bits of a float32 that these leave at zero


@triton.jit
def key_of(value, SHIFT: tl.constexpr):
    """A float as an integer of the same order; -0 and +0 are one number."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    full = key << SHIFT
    full = tl.where(key < 0, full | ((1 << SHIFT) - 1), full)
    return (full ^ ((full >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_from(value, SHIFT: tl.constexpr):
    """The lowest key of a logit that is not below the value."""
    key = key_of(value, SHIFT)
    return tl.where(value_of(key, SHIFT) < value, key + 1, key)
