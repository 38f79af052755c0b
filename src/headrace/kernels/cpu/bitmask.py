"""Forbids the tokens whose bits are not set. Words of all ones, which are most in a text, are passed over."""

from __future__ import annotations

import math

from torch import Tensor

from headrace.kernels.cpu.launch import Pointer, arguments_at, claim, floats, int32s, int64s, kernel

_NEG_INF = -math.inf


def apply_bitmask(logits: Tensor, places: Tensor, bits: Tensor) -> None:
    """See `ops.apply_bitmask`."""
    assert logits.is_contiguous() and bits.is_contiguous() and places.is_contiguous()
    num_lines, vocab_size = places.shape[0], logits.shape[1]
    assert bits.shape[1] * 32 >= vocab_size
    _apply(logits, places, bits, num_lines, vocab_size, bits.shape[1], num_tasks=num_lines)


@kernel(
    logits="pointer", places="pointer", bits="pointer", num_lines="integer", vocab_size="integer", num_words="integer"
)
def _apply(pointer: Pointer) -> None:
    a = arguments_at(pointer)
    logits, places, bits = floats(a.logits), int64s(a.places), int32s(a.bits)
    line = claim(pointer)
    while line < a.num_lines:
        start = places[line] * a.vocab_size
        for word in range((a.vocab_size + 31) // 32):
            value = bits[line * a.num_words + word]
            if value != -1:
                first = 32 * word
                for bit in range(min(32, a.vocab_size - first)):
                    if (value >> bit) & 1 == 0:
                        logits[start + first + bit] = _NEG_INF
        line = claim(pointer)
