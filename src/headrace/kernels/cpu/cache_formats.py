"""How keys and values lie in the cache: as float32, float16, or in eight bits (`LayerCache`).

    float16     s eeeee mmmmmmmmmm
    e3m4        s   eee mmmm          the float16 number with the bits s 00 eee mmmm 000000
    e4m3        s  eeee mmm           the float16 number with the bits s 0 eeee mmm 0000000, times 256

So eight bits are widened by a shift to float16, which the processor converts. Numbers out of range become the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.cpu.native import Pointer, floats, inner, int32s, uint8s, uint16s
from headrace.kernels.cpu.vectors import (
    Vector,
    bits_of,
    float_of_half,
    half_of_float,
    load,
    load_bytes_as_float16,
    load_float16,
    store,
)
from headrace.kernels.reference.attention import FLOAT16_MAX
from headrace.kernels.reference.e3m4 import E3M4_MAX
from headrace.kernels.reference.fp8 import FP8, FP8_MAX

FLOAT32_SIZE, FLOAT16_SIZE = 4, 2  # bytes; numbers of one byte need a shift besides
E4M3_SHIFT, E4M3_FACTOR = 7, 256.0
_MIN_NORMAL = 2.0**-14  # of a float16

# Loads LANES numbers from an address and an index on, with the shift of the format.
LoadAt: TypeAlias = Callable[[int, int, int], Vector]


@dataclass(frozen=True, slots=True)
class Format:
    """What kernels know of one side of a cache."""

    size: int  # bytes of a number
    shift: int = 0  # of eight bits: from a byte to a float16
    factor: float = 1.0  # what the widened numbers have to be multiplied by


_FORMATS = {
    torch.float32: Format(FLOAT32_SIZE),
    torch.float16: Format(FLOAT16_SIZE),
    torch.uint8: Format(1, shift=6),  # e3m4
    FP8: Format(1, shift=E4M3_SHIFT, factor=E4M3_FACTOR),
}


def format_of(side: Tensor) -> Format:
    return _FORMATS[side.dtype]


@inner
def _load_float32(address: int, index: int, shift: int) -> Vector:
    return load(floats(address), index)


@inner
def _load_float16(address: int, index: int, shift: int) -> Vector:
    return load_float16(address + FLOAT16_SIZE * index)


@inner
def _load_bytes(address: int, index: int, shift: int) -> Vector:
    return load_bytes_as_float16(address + index, shift)


LOADS: tuple[LoadAt, ...] = (_load_float32, _load_float16, _load_bytes)


@inner
def widen(source: int, stride: int, size: int, shift: int, target: Pointer, target_stride: int, num_rows: int) -> None:
    """Widens the LANES first numbers of each row. `source` is an address, `stride` numbers lie between rows."""
    if size == FLOAT16_SIZE:
        for row in range(num_rows):
            store(target, row * target_stride, _load_float16(source, row * stride, shift))
    else:
        for row in range(num_rows):
            store(target, row * target_stride, _load_bytes(source, row * stride, shift))


@inner
def take_numbers(
    source: int, stride: int, length: int, size: int, shift: int, target: Pointer, target_stride: int
) -> None:
    """Copies `length` numbers from an address, `stride` apart, widened one by one."""
    if size == FLOAT32_SIZE:
        numbers = floats(source)
        for i in range(length):
            target[i * target_stride] = numbers[i * stride]
    elif size == FLOAT16_SIZE:
        halves = uint16s(source)
        for i in range(length):
            target[i * target_stride] = float_of_half(halves[i * stride])
    else:
        for i in range(length):
            byte = int(uint8s(source)[i * stride])
            target[i * target_stride] = float_of_half((byte & 0x80) << 8 | (byte & 0x7F) << shift)


@inner
def put(numbers: int, length: int, unit: Any, target: int, stride: int, size: int, shift: int) -> None:
    """Stores float32 numbers, divided by a power of two, at an address and every `stride` numbers from there. The
    address that they are read from is scratch."""
    scale = np.float32(1.0) / unit
    if size == FLOAT32_SIZE:
        for i in range(length):
            floats(target)[i * stride] = floats(numbers)[i] * scale
    elif size == FLOAT16_SIZE:
        for i in range(length):
            uint16s(target)[i * stride] = _half_of(floats(numbers)[i] * scale)
    else:
        _round_to_bytes(numbers, length, scale, shift)
        for i in range(length):
            uint8s(target)[i * stride] = int32s(numbers)[i]


@inner
def _half_of(number: Any) -> Any:
    if number > FLOAT16_MAX:
        number = FLOAT16_MAX
    elif number < -FLOAT16_MAX:
        number = -FLOAT16_MAX
    return half_of_float(number)


@inner
def _round_to_bytes(numbers: int, length: int, scale: Any, shift: int) -> None:
    """Replaces each number by the byte of the nearest one, of two the even one. NaN becomes the largest: a key that is
    lost must not make scores of others NaN."""
    mantissa, largest = 10 - shift, np.float32(E3M4_MAX)
    if shift == E4M3_SHIFT:
        largest = np.float32(FP8_MAX / E4M3_FACTOR)
        scale = scale / np.float32(E4M3_FACTOR)
    smallest = np.float32(_MIN_NORMAL)  # below it numbers are multiples of 2 ** (-14 - mantissa),
    rounder = np.float32(1 << 9 - mantissa)  # as the float32 numbers from here on are
    dropped = 23 - mantissa
    for i in range(length):
        number = floats(numbers)[i] * scale
        size = abs(number)
        size = size if size < largest else largest
        bits, small = bits_of(size), bits_of(size + rounder) - bits_of(rounder)
        normal = (bits + (1 << dropped - 1) - 1 + (bits >> dropped & 1) >> dropped) - (127 - 15 << mantissa)
        code = small if size < smallest else normal
        int32s(numbers)[i] = code | 0x80 if number < 0 else code
