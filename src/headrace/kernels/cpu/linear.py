"""GEMMs with weights that MKL packs once, at load.

Packed weights are faster from a handful of rows on, most of all for the few dozen rows of a decode step. With a single
row both forms are limited by memory bandwidth, and the packed one is slightly slower; keeping the plain weight for that
case would double the model's memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels import reference

_ROWS_HINT = 256  # one packing serves any number of rows; the hint only guides MKL's choice of block sizes
_CHECKED_ROWS = (1, 5, 48)
_CHECKED_OUTPUTS = 1024  # spread over all, of a matrix with more: the plain GEMM of a head takes seconds


class PackedLinear:
    """A weight matrix and its bias, packed by MKL where that works, else transposed for a plain GEMM."""

    takes_fp8 = False

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        weight = weight.detach().contiguous()
        self._bias = None if bias is None else bias.detach().contiguous()
        self._shape = torch.zeros(1, 1).expand(weight.shape)  # MKL's operator reads only the shape
        self._packed = pack(weight)
        self._transposed = None if self._packed is not None else weight.t().contiguous()

    def __call__(self, x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        if self._packed is None:
            assert self._transposed is not None
            return x @ self._transposed if self._bias is None else torch.addmm(self._bias, x, self._transposed)
        return multiply(x, self._packed, self._shape, self._bias)


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:  # [N, K], [N]
    return PackedLinear(weight, bias)


def pack_experts(weight: Tensor) -> reference.PackedExperts:  # [E, N, K]
    return reference.PackedExperts(weight, PackedLinear)


def pack(weight: Tensor) -> Tensor | None:
    """Returns the weight as MKL packs it, or None where torch has no MKL or its results are wrong."""
    if not torch.backends.mkl.is_available() or not hasattr(torch.ops.mkl, "_mkl_linear"):
        return None
    packed: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight, _ROWS_HINT)
    if weight.shape not in _is_shape_right:
        _is_shape_right[weight.shape] = _is_right(packed, weight)
    return packed if _is_shape_right[weight.shape] else None


_is_shape_right: dict[torch.Size, bool] = {}  # the operator is not public: each shape is checked once per process


def _is_right(packed: Tensor, weight: Tensor) -> bool:
    num_columns = weight.shape[1]
    shape = torch.zeros(1, 1).expand(weight.shape)
    checked = torch.arange(0, len(weight), -(-len(weight) // _CHECKED_OUTPUTS))
    for num_rows in _CHECKED_ROWS:
        x = torch.linspace(-1.0, 1.0, num_rows * num_columns).view(num_rows, num_columns).sin_()
        expected = x @ weight[checked].t()
        got = multiply(x, packed, shape, None)[:, checked]
        if not torch.allclose(got, expected, rtol=1e-3, atol=1e-3 * _size(expected)):
            return False
    return True


def _size(x: Tensor) -> float:
    return float(x.abs().max())


def multiply(x: Tensor, packed: Tensor, shape: Tensor, bias: Tensor | None) -> Tensor:
    # The last argument must be x's own number of rows: with any other, the operator multiplies by `shape` instead.
    out: Tensor = torch.ops.mkl._mkl_linear(x, packed, shape, bias, x.shape[0])
    return out
