"""GGUF's storage types to groups of integers with scales and minima, which a CPU multiplies as they are.

The weights are exactly those that `dequantize` gives. Its other types, such as Q2_K and Q3_K, have no such form here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headrace.models.weights.dequantize import Bytes, Floats, halves, nibbles, six_bit_pairs, six_bit_values

_K_BLOCK_LEN = 256


class Groups(NamedTuple):
    """A weight is value * scale + minimum. Some types store scales and minima as integers times an outer number."""

    values: Bytes  # [blocks, weights]
    scales: Floats  # [blocks, groups]
    minima: Floats  # [blocks, groups]
    outer_scales: Floats | None = None  # [blocks, 1]
    outer_minima: Floats | None = None


@dataclass(frozen=True, slots=True)
class GroupedType:
    block_bytes: int
    bits: int  # of a value in memory: 4, 6 or 8
    group_len: int
    num_numbers: int  # of a group in memory: a scale, or a scale and a minimum
    has_outer: bool
    unpack: Callable[[Bytes], Groups]

    @property
    def bits_per_weight(self) -> float:
        """In memory, scales and minima included."""
        of_group = (8 if self.has_outer else 16) / self.group_len
        of_outer = 16 / _K_BLOCK_LEN if self.has_outer else 0.0
        return self.bits + self.num_numbers * (of_group + of_outer)


def _q4_0(blocks: Bytes) -> Groups:  # scale 2, values 16 bytes
    return _around(nibbles(blocks[:, None, 2:])[:, 0], halves(blocks[:, :2]), 8)


def _q4_1(blocks: Bytes) -> Groups:  # scale 2, minimum 2, values 16 bytes
    pairs = halves(blocks[:, :4])
    return Groups(nibbles(blocks[:, None, 4:])[:, 0], pairs[:, :1], pairs[:, 1:])


def _q5_0(blocks: Bytes) -> Groups:  # scale 2, fifth bits 4, values 16 bytes
    return _around(_with_fifth_bits(blocks[:, 2:6], blocks[:, 6:]), halves(blocks[:, :2]), 16)


def _q5_1(blocks: Bytes) -> Groups:  # scale 2, minimum 2, fifth bits 4, values 16 bytes
    pairs = halves(blocks[:, :4])
    return Groups(_with_fifth_bits(blocks[:, 4:8], blocks[:, 8:]), pairs[:, :1], pairs[:, 1:])


def _q8_0(blocks: Bytes) -> Groups:  # scale 2, values 32 bytes
    return _around(np.bitwise_xor(blocks[:, 2:], 128, dtype=np.uint8), halves(blocks[:, :2]), 128)


def _q4_k(blocks: Bytes) -> Groups:  # scale 2, minimum 2, eight scales and minima of 6 bits 12, values 128 bytes
    return _scaled_twice(nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256), blocks)


def _q5_k(blocks: Bytes) -> Groups:  # as Q4_K, with fifth bits 32 before the values
    low = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    low |= high << 4
    return _scaled_twice(low.reshape(-1, 256), blocks)


def _q6_k(blocks: Bytes) -> Groups:  # low bits 128, high bits 64, scales 16, scale 2 bytes
    outer = halves(blocks[:, 208:])
    found = _around(six_bit_values(blocks), outer * blocks[:, 192:208].view(np.int8), 32)
    return found._replace(outer_scales=outer, outer_minima=outer * np.float32(-32))


def _around(values: Bytes, scales: Floats, zero: int) -> Groups:
    return Groups(values, scales, scales * np.float32(-zero))


def _with_fifth_bits(fifth: Bytes, low: Bytes) -> Bytes:  # [n, 4], [n, 16] -> [n, 32]
    values = nibbles(low[:, None])[:, 0]
    values |= np.unpackbits(fifth, axis=1, bitorder="little") << 4
    return values


def _scaled_twice(values: Bytes, blocks: Bytes) -> Groups:
    outer = halves(blocks[:, :4])
    scales, minima = six_bit_pairs(blocks[:, 4:16])
    outer_scales, outer_minima = outer[:, :1], -outer[:, 1:]
    return Groups(values, outer_scales * scales, outer_minima * minima, outer_scales, outer_minima)


TYPES = {
    "Q4_0": GroupedType(18, 4, 32, 1, False, _q4_0),
    "Q4_1": GroupedType(20, 4, 32, 2, False, _q4_1),
    "Q5_0": GroupedType(22, 6, 32, 1, False, _q5_0),
    "Q5_1": GroupedType(24, 6, 32, 2, False, _q5_1),
    "Q8_0": GroupedType(34, 8, 32, 1, False, _q8_0),
    "Q4_K": GroupedType(144, 4, 32, 2, True, _q4_k),
    "Q5_K": GroupedType(176, 6, 32, 2, True, _q5_k),
    "Q6_K": GroupedType(210, 6, 16, 1, True, _q6_k),
}
