"""Logits as integers that compare in the same order: 16 bits for bfloat16, 32 for float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # low bits of a float32 that are zero in these types


@triton.jit
def key_of(value, SHIFT: tl.constexpr):
    """Converts a float to an integer of the same order; -0 and +0 are equal."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    """Converts a key back to its float."""
    full = key << SHIFT
    full = tl.where(key < 0, full | ((1 << SHIFT) - 1), full)
    return (full ^ ((full >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_from(value, SHIFT: tl.constexpr):
    """Returns the lowest key whose value is not below `value`."""
    key = key_of(value, SHIFT)
    return tl.where(value_of(key, SHIFT) < value, key + 1, key)
