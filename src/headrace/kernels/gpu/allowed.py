"""Only some tokens may be drawn: a bit for each token of the vocabulary, in the row's own settings."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 4096


def keep_allowed(
    logits: Tensor,  # [R, V], changed in place: what is not allowed becomes -inf (and a NaN stays one)
    places: Tensor,  # [Q] int64, of the rows in the batch that this is for
    rows: Tensor,  # [R] int64
    bits: Tensor,  # [num_rows, V / 8 rounded up] uint8, the lowest bit for the first token
) -> None:
    num_places, vocab_size = places.shape[0], logits.shape[1]
    _keep_allowed[(num_places, triton.cdiv(vocab_size, _CHUNK))](
        logits, places, rows, bits, vocab_size, logits.stride(0), bits.stride(0), CHUNK=_CHUNK, num_warps=8
    )


@triton.jit
def _keep_allowed(logits, places, rows, bits, vocab_size, stride, bits_stride, CHUNK: tl.constexpr):
    place = tl.load(places + tl.program_id(0)).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    number = tl.program_id(1) * (CHUNK // 8) + tl.arange(0, CHUNK // 8)
    byte = tl.load(bits + row * bits_stride + number, mask=number * 8 < vocab_size, other=255).to(tl.int32)
    bit = tl.arange(0, 8)
    tokens = number[:, None] * 8 + bit[None, :]
    is_banned = ((byte[:, None] >> bit[None, :]) & 1) == 0
    at, inside = logits + place * stride + tokens, tokens < vocab_size
    logit = tl.load(at, mask=inside, other=0.0)
    tl.store(at, tl.where(is_banned, logit + float("-inf"), logit), mask=inside)  # all: whole lines are written faster
