"""What is applied to logits before sampling."""

from __future__ import annotations

from torch import Tensor

from headrace.kernels.ops.dispatch import kernels_for


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Computes cap * tanh(x / cap) in place."""
    out: Tensor = kernels_for(x.device, x.dtype).soft_cap(x, cap)
    return out


def apply_bitmask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:  # [R, V], [Q] int64, [Q, words] int32
    """Sets logits[rows[i], t] to -inf, in place, where bit t % 32 of bits[i, t // 32] is not set."""
    kernels_for(logits.device, logits.dtype).apply_bitmask(logits, rows, bits)
