"""A matrix of four bits in memory, and how kernels widen its weights in registers, two in two instructions.

packed      [K / 128, N, 16] int32: 64 bytes are 128 weights of a row, and a tile of rows is one run of memory
a word      weights 32 * j + 2 * i and 32 * j + 2 * i + 1 of its 128 are bits 4 * j and 16 + 4 * j of word i, so
            that one shift and one mask give two weights beside each other, as the tensor cores want them
a weight    0 to 15 in the low bits of a float whose step is 1 there: 128 + value in bfloat16, 1,024 + value in
            float16, exact; the zero point with the same offset is subtracted (`value_pairs`)
scales      [groups, N] float32, applied to the sums of a group; a zero point is in the last bits of its scale
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.quantized import INT4_MIDDLE, Int4Weight

PACK_LEN = 128  # weights of a row that are packed together
_WORDS = 16  # 32-bit words of them
_SHORT_GROUPS = (32, 64)  # others are multiples of PACK_LEN


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


def can_pack(weight: Int4Weight) -> bool:
    return weight.group_len in _SHORT_GROUPS or weight.group_len % PACK_LEN == 0


def pack(weight: Int4Weight, num_tiles: int = 0) -> Int4Matrix:
    """`num_tiles`: most tiles whose sums are split over programs."""
    packed = pack_words(weight.values)
    scales = weight.scales.float() if weight.zeros is None else with_zeros(weight.scales, weight.zeros)
    return Int4Matrix(
        packed,
        _per_group(scales, weight.group_len, packed.shape[0]),
        weight.zeros is not None,
        weight.values.shape[1],
        PACK_LEN // min(PACK_LEN, weight.group_len),
        torch.zeros(num_tiles, dtype=torch.int32, device=packed.device),
    )


def pack_words(values: Tensor) -> Tensor:  # [N, K] uint8 -> [ceil(K / 128), N, 16] int32
    """Packs four bits of each value. Weights past the last have a value too: their inputs are zero."""
    num_rows = values.shape[0]
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % PACK_LEN), value=INT4_MIDDLE)
    # [N, blocks, j, i, half] -> [blocks, N, i, half, j]
    parts = padded.view(num_rows, -1, 4, _WORDS, 2).permute(1, 0, 3, 4, 2)
    halves = torch.zeros(parts.shape[:-1], dtype=torch.int32, device=values.device)
    for index in range(4):
        halves |= parts[..., index].int() << (4 * index)
    return (halves[..., 0] | (halves[..., 1] << 16)).contiguous()


def _per_group(numbers: Tensor, group_len: int, num_blocks: int) -> Tensor:  # [N, K / group_len] -> [groups, N]
    """Repeats the numbers of groups that are longer than a block, and adds zeros for what a last block lacks."""
    repeated = numbers.repeat_interleave(max(1, group_len // PACK_LEN), 1)
    num_groups = num_blocks * (PACK_LEN // min(PACK_LEN, group_len))
    return torch.nn.functional.pad(repeated, (0, num_groups - repeated.shape[1])).t().contiguous()


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


@triton.jit
def values_of(words, zero, PAIR: tl.constexpr, like, IS_INTERPRETED: tl.constexpr):
    """Widens pair number PAIR of every word: [C, 16] -> [C, 32]."""
    return tl.reshape(value_pairs(words, zero, PAIR, like.dtype.element_ty, IS_INTERPRETED), [words.shape[0], 32])


@triton.jit
def zero_points(scale, like, HAS_ZEROS: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Returns the zero points of a group as `value_pairs` takes them, [COLUMNS, 1]."""
    if HAS_ZEROS:
        zero = zero_of(scale)
    else:
        zero = tl.full(scale.shape, 8, tl.int32)
    return zero_pairs(zero, like.dtype.element_ty, IS_INTERPRETED)[:, None]


@triton.jit
def weights_of(words, zero, FIRST: tl.constexpr, COUNT: tl.constexpr, like, IS_INTERPRETED: tl.constexpr):
    """Widens COUNT consecutive pairs: [C, 16] -> [C, 32 * COUNT], in the order of the inputs."""
    first = values_of(words, zero, FIRST, like, IS_INTERPRETED)
    columns: tl.constexpr = words.shape[0]
    if COUNT == 1:
        return first
    elif COUNT == 2:
        both = tl.join(first, values_of(words, zero, FIRST + 1, like, IS_INTERPRETED))
        return tl.reshape(tl.permute(both, (0, 2, 1)), [columns, 64])
    else:
        even = tl.join(first, values_of(words, zero, 2, like, IS_INTERPRETED))
        odd = tl.join(values_of(words, zero, 1, like, IS_INTERPRETED), values_of(words, zero, 3, like, IS_INTERPRETED))
        return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 1)), [columns, 128])
