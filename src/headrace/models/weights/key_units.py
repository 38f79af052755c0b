"""The units of a layer's keys in an FP8 cache (`LayerCache.key_units`), from its weights.

The mean square of a head's keys is estimated as if the channels of the normed input were independent. Units are the
powers of two that leave HEADROOM above its root: the range must hold for all inputs, and more of it costs no precision
that can be measured (docs/experiments.md). RoPE and the mixing of dimensions keep the mean square of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.quantized import dequantize, take_rows
from headrace.kernels.reference.e3m4 import E3M4_MAX
from headrace.models.layers import Norm
from headrace.models.weights.reader import Matrix

# How far the largest number is above the root mean square, at least. Another one needs another name of the format of
# stored blocks, in `engine/kv_offloading.py`.
HEADROOM = 32.0
_MEAN_SQUARES = (1e-12, 1e12)  # what is taken for keys of zeros, or of broken weights


def units_of_projected(
    qkv: Matrix, norm: Norm | None, *, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[float, ...]:
    """Units of keys without a norm of their own: of the rows after those of the queries. `norm`: of the input."""
    if (qkv.weight if isinstance(qkv.weight, Tensor) else qkv.weight.values).is_meta:
        return _no_units(num_kv_heads)
    first = num_heads * head_dim
    rows = _rows(qkv, first, first + num_kv_heads * head_dim)
    gains = rows if norm is None else rows * norm.weight
    squares = gains.square().sum(1, dtype=torch.float64)
    means = torch.zeros_like(squares)
    if norm is not None and norm.bias is not None:
        means += (rows * norm.bias).sum(1, dtype=torch.float64)
    if qkv.bias is not None:
        means += qkv.bias[first : first + len(rows)]
    return _units((squares + means.square()).view(num_kv_heads, head_dim))


def units_of_normed(gains: Tensor) -> tuple[float, ...]:  # [Hkv, D]
    """Units of keys that are normed with these gains."""
    if gains.is_meta:
        return _no_units(len(gains))
    return _units(gains.double().square())


def _rows(matrix: Matrix, start: int, end: int) -> Tensor:  # [rows, H] float32
    weight = matrix.weight
    if isinstance(weight, Tensor):
        return weight[start:end].float()
    taken = take_rows(weight, torch.arange(start, end))
    return dequantize(weight)[start:end] if taken is None else dequantize(taken)


def _units(squares: Tensor) -> tuple[float, ...]:  # [Hkv, D] float64
    sizes = squares.mean(1).nan_to_num(1.0).clamp(*_MEAN_SQUARES).sqrt()
    return tuple((HEADROOM / E3M4_MAX * sizes).log2().ceil().exp2().tolist())


def _no_units(num_kv_heads: int) -> tuple[float, ...]:
    """Without weights, as in a dry start or when reads are announced. The products of meta tensors would import sympy
    and torch._dynamo, which takes most of a second."""
    return (1.0,) * num_kv_heads
