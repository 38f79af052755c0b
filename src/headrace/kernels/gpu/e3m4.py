"""Keys in e3m4: rounding to bytes, and widening bytes to float16. See `kernels/reference/e3m4.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.reference.e3m4 import E3M4_MAX

_MAX = tl.constexpr(E3M4_MAX)
_MIN_NORMAL = tl.constexpr(2.0**-14)
_ROUNDER = tl.constexpr(32.0)
_ROUNDER_BITS = tl.constexpr(0x42000000)

# Four bytes become four float16 numbers. prmt puts copies of a byte's sign before it, which the shift moves to the sign
# of the float16, among other bits.
_WIDEN = tl.constexpr("""{
.reg .b32 low, high;
prmt.b32 low, $2, 0, 0x9180;
prmt.b32 high, $2, 0, 0xB3A2;
shl.b32 low, low, 6;
shl.b32 high, high, 6;
and.b32 $0, low, 0x9FC09FC0;
and.b32 $1, high, 0x9FC09FC0;
}""")


@triton.jit
def encode_e3m4(x):
    """Rounds float32 numbers to bytes: to nearest even, within the range, and NaN to the largest number."""
    size = tl.abs(x)
    size = tl.where(size < _MAX, size, _MAX)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x3FFFF + ((bits >> 19) & 1)) >> 19) - (112 << 4)
    small = (size + _ROUNDER).to(tl.int32, bitcast=True) - _ROUNDER_BITS
    code = tl.where(size < _MIN_NORMAL, small, normal)
    return (code | tl.where(x < 0.0, 0x80, 0)).to(tl.uint8)


@triton.jit
def widen_e3m4(codes, IS_INTERPRETED: tl.constexpr):
    """Converts bytes to float16."""
    if IS_INTERPRETED:
        bits = codes.to(tl.int32)
        wide = (((bits & 0x80) << 8) | ((bits & 0x7F) << 6)).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        wide = tl.inline_asm_elementwise(_WIDEN, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    return wide


@triton.jit
def key_in(dtype: tl.constexpr, key, IS_INTERPRETED: tl.constexpr):
    """Converts keys to the type of a dot product. What is in e3m4 is not multiplied by its unit: see
    `scale_of_head`."""
    if key.dtype == tl.uint8:
        wide = widen_e3m4(key, IS_INTERPRETED)
    else:
        wide = key
    return wide.to(dtype)


@triton.jit
def scale_of_head(scale, keys, key_units, head):
    """Returns the factor of scores: with keys in e3m4, it has the unit of the head's keys too."""
    if keys.dtype.element_ty == tl.uint8:
        scale = scale * tl.load(key_units + head)
    return scale


@triton.jit
def stored_key(key, keys, key_units, head):
    """Converts a key in float32 to what the cache stores."""
    if keys.dtype.element_ty == tl.uint8:
        unit = tl.load(key_units + head).to(tl.int32, bitcast=True)
        inverse = (0x7F000000 - unit).to(tl.float32, bitcast=True)  # 1 / 2 ** n exactly; divisions are approximate
        stored = encode_e3m4(key * inverse)
    else:
        stored = key.to(keys.dtype.element_ty)
    return stored
