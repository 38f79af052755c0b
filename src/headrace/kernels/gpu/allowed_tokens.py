"""allowed_token_ids: sets the logits of all other tokens to -inf. A slot has one bit per token of the vocabulary."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 4096


def keep_allowed(
    logits: Tensor,  # [R, V], changed in place: tokens that are not allowed become -inf, a NaN stays a NaN
    rows: Tensor,  # [Q] int64, rows of the batch whose slots use the feature
    slots: Tensor,  # [R] int64, the slot of each row
    bits: Tensor,  # [num_slots, V / 8 rounded up] uint8, the lowest bit for the first token
) -> None:
    num_rows, vocab_size = rows.shape[0], logits.shape[1]
    _keep_allowed[(num_rows, triton.cdiv(vocab_size, _CHUNK))](
        logits, rows, slots, bits, vocab_size, logits.stride(0), bits.stride(0), CHUNK=_CHUNK, num_warps=8
    )


@triton.jit
def _keep_allowed(logits, rows, slots, bits, vocab_size, stride, bits_stride, CHUNK: tl.constexpr):
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    number = tl.program_id(1) * (CHUNK // 8) + tl.arange(0, CHUNK // 8)
    byte = tl.load(bits + slot * bits_stride + number, mask=number * 8 < vocab_size, other=255).to(tl.int32)
    bit = tl.arange(0, 8)
    tokens = number[:, None] * 8 + bit[None, :]
    is_banned = ((byte[:, None] >> bit[None, :]) & 1) == 0
    at, inside = logits + row * stride + tokens, tokens < vocab_size
    logit = tl.load(at, mask=inside, other=0.0)
    tl.store(
        at, tl.where(is_banned, logit + float("-inf"), logit), mask=inside
    )  # allowed ones too: full cache lines are written faster
