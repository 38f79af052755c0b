"""Keys in e3m4: bytes with a sign, three bits of exponent and four of mantissa, for which PyTorch has no type.

A byte is the float16 number with the same sign and the same low bits of exponent and mantissa:

    e3m4                     s eee mmmm
    float16             s 00 eee mmmm 000000

So widening is a shift, and the numbers go up to 31 / 4096. Keys are divided by the unit of their head, a power of two,
before they are rounded (`LayerCache.key_units`). All bytes are finite numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

E3M4_MAX = 31 / 4096
_MIN_NORMAL = 2.0**-14  # below it, numbers are multiples of 2 ** -18
_ROUNDER = 32.0  # the float32 numbers from here on are multiples of 2 ** -18 too: adding it rounds


def plain_key_units(num_kv_heads: int, device: torch.device) -> Tensor:
    """Units of keys of which nothing is known, up to 62."""
    return torch.full((num_kv_heads,), 2.0**13, device=device)


def encode_e3m4(x: Tensor) -> Tensor:
    """Rounds to nearest even. What exceeds the range becomes the largest number with its sign, and NaN the positive
    one: a key that is lost must not make scores of others NaN."""
    wide = x.float()
    sizes = wide.abs()
    sizes = torch.where(sizes < E3M4_MAX, sizes, E3M4_MAX)
    bits = sizes.view(torch.int32)
    normal = ((bits + 0x3FFFF + (bits >> 19 & 1)) >> 19) - (127 - 15 << 4)  # float32 has 19 more bits of mantissa
    small = (sizes + _ROUNDER).view(torch.int32) - torch.full_like(sizes, _ROUNDER).view(torch.int32)
    codes = torch.where(sizes < _MIN_NORMAL, small, normal)
    return torch.where(wide < 0, codes | 0x80, codes).to(torch.uint8)


def decode_e3m4(codes: Tensor) -> Tensor:  # float32
    wide = codes.to(torch.int32)
    return ((wide & 0x80) << 8 | (wide & 0x7F) << 6).to(torch.int16).view(torch.float16).float()
