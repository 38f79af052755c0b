"""Sets the logits of tokens whose bits are not set to -inf."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


def apply_bitmask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """See `ops.apply_bitmask`."""
    assert logits.stride(1) == bits.stride(1) == 1
    vocab_size = logits.shape[1]
    assert bits.shape[1] * 32 >= vocab_size
    if rows.shape[0]:
        _apply_bitmask[(rows.shape[0], triton.cdiv(vocab_size, _BLOCK))](
            logits, rows, bits, vocab_size, logits.stride(0), bits.stride(0), BLOCK=_BLOCK, num_warps=4
        )


@triton.jit
def _apply_bitmask(logits, rows, bits, vocab_size, stride, bits_stride, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    word = tl.load(bits + index * bits_stride + tokens // 32, mask=inside, other=-1)
    is_forbidden = ((word >> (tokens % 32)) & 1) == 0
    at = logits + tl.load(rows + index).to(tl.int64) * stride + tokens
    tl.store(at, tl.full([BLOCK], float("-inf"), logits.dtype.element_ty), mask=inside & is_forbidden)
