"""Rounding with error compensation, as GPTQ does it: the columns of a matrix are rounded one after the other, and those
that are left change so that they make up for what each rounding does to the output.

How much they can is known from the second moments of the inputs: if two inputs rise and fall together, the weight of
one can replace that of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from headrace.kernels.quantized import FP8, FP8_MAX, INT4_MAX, Fp8Weight, Int4Weight, quantize_fp8, quantize_int4

_DAMPING = 0.01  # of the mean square of an input, added to each: for inputs that are always zero, or few samples
_BLOCK_LEN = 128  # columns whose errors are applied to all later columns at once

Nearest = Callable[[Tensor], Tensor]  # [N] -> [N], the nearest weights that can be stored


def compensated_int4(weight: Tensor, moments: Tensor, group_len: int) -> Int4Weight:  # [N, K], [K, K]
    """Quantizes a matrix whose inputs x have these sums of x xT. Scales and zero points of a group are chosen when its
    first column is reached."""
    left, factors, parts = weight.float().clone(), _factors(moments.to(weight.device)), []
    for first in range(0, left.shape[1], group_len):
        columns = slice(first, first + group_len)
        group = quantize_int4(left[:, columns], group_len, has_zeros=True)
        assert group.zeros is not None
        scale, zero = group.scales[:, 0], group.zeros[:, 0].float()
        _round_columns(left, columns, factors, partial(_nearest_of_four_bits, scale=scale, zero=zero))
        values = _four_bits(left[:, columns], scale[:, None], zero[:, None]).to(torch.uint8)
        parts.append(Int4Weight(values, group.scales, group.zeros))
    return Int4Weight(
        torch.cat([part.values for part in parts], 1),
        torch.cat([part.scales for part in parts], 1),
        torch.cat([part.zeros for part in parts if part.zeros is not None], 1),
    )


def compensated_fp8(weight: Tensor, moments: Tensor) -> Fp8Weight:  # [N, K], [K, K]
    """Quantizes a matrix to FP8, with the scales that rounding to nearest has."""
    left, factors, scales = weight.float().clone(), _factors(moments.to(weight.device)), quantize_fp8(weight).scales
    for first in range(0, left.shape[1], _BLOCK_LEN):
        columns = slice(first, min(first + _BLOCK_LEN, left.shape[1]))
        _round_columns(left, columns, factors, partial(_nearest_of_eight_bits, scale=scales[:, 0]))
    return Fp8Weight(_eight_bits(left, scales), scales)


def _four_bits(weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return (weight / scale).round_().add_(zero).clamp_(0, INT4_MAX)


def _nearest_of_four_bits(weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return (_four_bits(weight, scale, zero) - zero) * scale


def _eight_bits(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def _nearest_of_eight_bits(weight: Tensor, scale: Tensor) -> Tensor:
    return _eight_bits(weight, scale).float() * scale


def _factors(moments: Tensor) -> Tensor:  # [K, K]
    """The upper Cholesky factor of the inverse: row j says how column j's error is spread over the later columns."""
    damped = moments.float().clone()
    damped.diagonal().add_(_DAMPING * damped.diagonal().mean().clamp(min=1e-9))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factors: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factors


def _round_columns(left: Tensor, columns: slice, factors: Tensor, nearest: Nearest) -> None:
    """Rounds these columns of a matrix one by one, and lets all later ones make up for it."""
    block, own = left[:, columns], factors[columns, columns]
    errors = torch.empty_like(block)
    for column in range(block.shape[1]):
        errors[:, column] = (block[:, column] - nearest(block[:, column])) / own[column, column]
        block[:, column:] -= errors[:, column, None] * own[column, column:]
    left[:, columns.stop :] -= errors @ factors[columns, columns.stop :]
