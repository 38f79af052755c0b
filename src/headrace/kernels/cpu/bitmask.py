"""Sets the logits of tokens whose bits are not set to -inf. Words of all ones, the most common, are skipped."""

from __future__ import annotations

import math

from torch import Tensor

from headrace.kernels.cpu.launch import arguments_at, claim, kernel
from headrace.kernels.cpu.native import Pointer, floats, int32s, int64s

_NEG_INF = -math.inf


def apply_bitmask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """See `ops.apply_bitmask`."""
    assert logits.is_contiguous() and bits.is_contiguous() and rows.is_contiguous()
    num_rows, vocab_size = rows.shape[0], logits.shape[1]
    assert bits.shape[1] * 32 >= vocab_size
    _apply(logits, rows, bits, num_rows, vocab_size, bits.shape[1], num_tasks=num_rows)


@kernel(logits="pointer", rows="pointer", bits="pointer", num_rows="integer", vocab_size="integer", num_words="integer")
def _apply(pointer: Pointer) -> None:
    a = arguments_at(pointer)
    logits, rows, bits = floats(a.logits), int64s(a.rows), int32s(a.bits)
    index = claim(pointer)
    while index < a.num_rows:
        start = rows[index] * a.vocab_size
        for word in range((a.vocab_size + 31) // 32):
            value = bits[index * a.num_words + word]
            if value != -1:
                first = 32 * word
                for bit in range(min(32, a.vocab_size - first)):
                    if (value >> bit) & 1 == 0:
                        logits[start + first + bit] = _NEG_INF
        index = claim(pointer)
