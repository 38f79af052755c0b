"""GGUF's storage types to float32: the common ones here, several times faster, the others by the `gguf` package.

A block is a run of weights that share scales: 32 weights in Q4_0, Q4_1 and Q8_0, 256 in Q4_K and Q6_K.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import UnsupportedModelError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]


def dequantize(raw: Bytes, type_name: str, out: Floats) -> None:
    """Dequantizes rows as stored, [rows, bytes], into `out`, which must be contiguous and of as many weights."""
    if type_name in _BLOCKS:
        block_bytes, unpack = _BLOCKS[type_name]
        blocks = raw.reshape(-1, block_bytes)
        unpack(blocks, out.reshape(len(blocks), -1))
    else:
        plain = _PLAIN.get(type_name)
        out[...] = (raw.view(plain) if plain else _by_package(raw, type_name)).reshape(out.shape)


def is_block_type(type_name: str) -> bool:
    """Tells whether it is one of the quantized types that are read here."""
    return type_name in _BLOCKS and type_name != "BF16"


def _by_package(raw: Bytes, type_name: str) -> Floats:
    from gguf import GGMLQuantizationType, quants

    try:
        weights: Floats = quants.dequantize(raw, GGMLQuantizationType[type_name])
    except NotImplementedError:
        raise UnsupportedModelError(
            f"weights stored as {type_name} cannot be read; use a file quantized otherwise, such as Q8_0 or Q4_K_M"
        ) from None
    return weights


def _bf16(blocks: Bytes, out: Floats) -> None:  # the upper half of a float32
    np.left_shift(blocks.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


def _q4_0(blocks: Bytes, out: Floats) -> None:  # scale 2, values 16 bytes
    out[...] = nibbles(blocks[:, None, 2:])[:, 0]
    out -= 8
    out *= halves(blocks[:, :2])


def _q4_1(blocks: Bytes, out: Floats) -> None:  # scale 2, minimum 2, values 16 bytes
    scales = halves(blocks[:, :4])
    out[...] = nibbles(blocks[:, None, 4:])[:, 0]
    out *= scales[:, :1]
    out += scales[:, 1:]


def _q8_0(blocks: Bytes, out: Floats) -> None:  # scale 2, values 32 bytes
    out[...] = blocks[:, 2:].view(np.int8)
    out *= halves(blocks[:, :2])


def _q4_k(
    blocks: Bytes, out: Floats
) -> None:  # scale 2, minimum 2, eight scales and minima of 6 bits 12, values 128 bytes
    outer = halves(blocks[:, :4])
    scales, minima = six_bit_pairs(blocks[:, 4:16])
    weights = out.reshape(-1, 8, 32)
    weights[...] = nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    weights *= (outer[:, :1] * scales)[:, :, None]
    weights -= (outer[:, 1:] * minima)[:, :, None]


def _q6_k(blocks: Bytes, out: Floats) -> None:  # low bits 128, high bits 64, scales 16, scale 2 bytes
    out[...] = six_bit_values(blocks)
    out -= 32
    weights = out.reshape(-1, 16, 16)
    weights *= (halves(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8))[:, :, None]


def halves(data: Bytes) -> Floats:
    """Converts float16 numbers stored in bytes."""
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def nibbles(data: Bytes) -> Bytes:
    """[n, groups, bytes] -> [n, groups, 2 * bytes]: returns for each group the low nibbles of all bytes, then the
    high ones."""
    num_blocks, num_groups, num_bytes = data.shape
    values = np.empty((num_blocks, num_groups, 2, num_bytes), dtype=np.uint8)
    np.bitwise_and(data, 15, out=values[:, :, 0])
    np.right_shift(data, 4, out=values[:, :, 1])
    return values.reshape(num_blocks, num_groups, 2 * num_bytes)


def six_bit_values(blocks: Bytes) -> Bytes:  # of Q6_K: [n, bytes] -> [n, 256]
    values = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    values |= (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3) << 4
    return values.reshape(-1, 256)


def six_bit_pairs(packed: Bytes) -> tuple[Array, Array]:  # [n, 12] -> scales and minima, [n, 8] each
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    # The top two bits of `first` and `second` complete the nibbles of `rest`.
    scales = np.concatenate((first & 63, (rest & 15) | (first >> 6 << 4)), axis=1)
    minima = np.concatenate((second & 63, (rest >> 4) | (second >> 6 << 4)), axis=1)
    return scales, minima


_PLAIN = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}
_BLOCKS: dict[str, tuple[int, Callable[[Bytes, Floats], None]]] = {  # bytes of a block, and its unpacking
    "BF16": (2, _bf16),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q6_K": (210, _q6_k),
}
