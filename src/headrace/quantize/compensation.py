"""Four bits with error compensation, as GPTQ does it: the columns of a matrix are rounded one after the other, and
those that are left change so that they make up for what each rounding does to the output.

How much they can is known from the second moments of the inputs: if two inputs rise and fall together, the weight of
one can replace that of the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.quantized import INT4_MAX, Int4Weight, quantize_int4

_DAMPING = 0.01  # of the mean square of an input, added to each: for inputs that are always zero, or few samples


def quantize_compensated(weight: Tensor, moments: Tensor, group_len: int) -> Int4Weight:  # [N, K], [K, K]
    """Quantizes a matrix whose inputs x have these sums of x xT. Scales and zero points of a group are chosen when its
    first column is reached."""
    left = weight.float().clone()
    factors = _factors(moments.to(left.device))
    parts = []
    for first in range(0, left.shape[1], group_len):
        end = first + group_len
        group = quantize_int4(left[:, first:end], group_len, has_zeros=True)
        values, errors = _round_group(left[:, first:end], group, factors[first:end, first:end])
        left[:, end:] -= errors @ factors[first:end, end:]
        parts.append(Int4Weight(values, group.scales, group.zeros))
    return Int4Weight(
        torch.cat([part.values for part in parts], 1),
        torch.cat([part.scales for part in parts], 1),
        torch.cat([part.zeros for part in parts if part.zeros is not None], 1),
    )


def _factors(moments: Tensor) -> Tensor:  # [K, K]
    """The upper Cholesky factor of the inverse: row j says how column j's error is spread over the later columns."""
    damped = moments.float().clone()
    damped.diagonal().add_(_DAMPING * damped.diagonal().mean().clamp(min=1e-9))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factors: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factors


def _round_group(left: Tensor, group: Int4Weight, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds the columns of one group; returns their values and errors. Changes `left`."""
    assert group.zeros is not None
    scale, zero = group.scales[:, 0], group.zeros[:, 0].float()
    values, errors = torch.empty_like(group.values), torch.empty_like(left)
    for column in range(left.shape[1]):
        rounded = (left[:, column] / scale).round_().add_(zero).clamp_(0, INT4_MAX)
        error = (left[:, column] - (rounded - zero) * scale) / factors[column, column]
        left[:, column:] -= error[:, None] * factors[column, column:]
        values[:, column], errors[:, column] = rounded.to(torch.uint8), error
    return values, errors
