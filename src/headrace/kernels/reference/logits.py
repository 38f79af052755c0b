"""What is applied to logits before sampling."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Computes cap * tanh(x / cap) in place."""
    return x.div_(cap).tanh_().mul_(cap)


def apply_bitmask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Sets logits[rows[i], t] to -inf, in place, where bit t % 32 of bits[i, t // 32] is not set."""
    is_set = (bits[:, :, None] >> torch.arange(32, device=bits.device, dtype=bits.dtype)) & 1  # [Q, words, 32]
    forbidden = is_set.flatten(1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)
