"""Linear layers: weights packed once, at load, for the GEMMs of float32, of INT8, or of float32 by packed weights.

The packed form serves any number of rows. The weights are not kept in any other one: that would double the model's
memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from headrace.kernels import reference
from headrace.kernels.cpu import gemm, gemm_int8, gemm_weight_only
from headrace.kernels.cpu.panels import IS_SUPPORTED, as_panels, padded
from headrace.kernels.quantized import GroupedWeight, Int4Weight, Int8Weight, QuantizedWeight, dequantize, grouped
from headrace.kernels.ranges import OPERATION, Ranges


class _Linear(ABC):
    """While a profiler records, `ranges` puts each GEMM into a range, as `ops` does with other operations."""

    ranges: ClassVar[Ranges | None] = None

    def __call__(self, x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        x = x if x.stride(1) == 1 else x.contiguous()
        if _Linear.ranges is None:
            return self._multiply(x)
        with _Linear.ranges(f"{OPERATION}linear"):
            return self._multiply(x)

    def prefers_fp8(self, num_rows: int) -> bool:
        return False

    @abstractmethod
    def _multiply(self, x: Tensor) -> Tensor: ...


class PackedLinear(_Linear):
    """A weight matrix and its bias as panels."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._num_out = len(weight)
        self._packed = as_panels(weight.detach(), torch.float32)
        self._bias = padded(_bias_of(bias, self._num_out))

    def _multiply(self, x: Tensor) -> Tensor:
        return gemm.multiply(x, self._packed, self._bias, self._num_out)


class TransposedLinear(_Linear):
    """A weight matrix and its bias for torch's own GEMM."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._transposed, self._bias = weight.detach().t().contiguous(), bias

    def _multiply(self, x: Tensor) -> Tensor:
        return x @ self._transposed if self._bias is None else torch.addmm(self._bias, x, self._transposed)


class Int8Linear(_Linear):
    """INT8 weights as panels; rows are quantized as they come, with a scale for each chunk of their inputs."""

    def __init__(self, weight: Int8Weight, bias: Tensor | None = None) -> None:
        self._num_out = len(weight.values)
        self._packed = gemm_int8.pack(weight.values, weight.scales.flatten(), _bias_of(bias, self._num_out))

    def _multiply(self, x: Tensor) -> Tensor:
        return gemm_int8.multiply_packed(x, self._packed, self._num_out)


class WeightOnlyLinear(_Linear):
    """Weights of four or eight bits as panels, for rows in float32. `order`: that of the inputs, if not their own."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None = None, order: Tensor | None = None) -> None:
        self._num_out, self._order = len(weight.values), order
        self._packed = gemm_weight_only.pack(weight)
        self._bias = padded(_bias_of(bias, self._num_out))

    def _multiply(self, x: Tensor) -> Tensor:
        x = x if self._order is None else x.index_select(1, self._order)
        return gemm_weight_only.multiply(x, self._packed, self._bias, self._num_out)


def _bias_of(bias: Tensor | None, num_out: int) -> Tensor:
    return torch.zeros(num_out) if bias is None else bias


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear | TransposedLinear:  # [N, K], [N]
    return (PackedLinear if IS_SUPPORTED else TransposedLinear)(weight, bias)


def pack_experts(weight: Tensor) -> reference.PackedExperts:  # [E, N, K]
    return reference.PackedExperts([pack_linear(matrix) for matrix in weight], weight.shape[1], weight.dtype)


def pack_quantized(
    weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype
) -> PackedLinear | TransposedLinear | Int8Linear | WeightOnlyLinear:
    """Keeps weights in four and eight bits as they are, but for FP8, which it dequantizes."""
    if isinstance(weight, Int8Weight) and IS_SUPPORTED:
        return Int8Linear(weight, bias)
    order = weight.order if isinstance(weight, Int4Weight) else None
    integers = grouped(weight) if isinstance(weight, Int4Weight) else weight
    if isinstance(integers, GroupedWeight) and IS_SUPPORTED and gemm_weight_only.can_pack(integers):
        return WeightOnlyLinear(integers, bias, order)
    return pack_linear(dequantize(weight).to(dtype), bias)


def takes_groups() -> bool:
    """See `ops.takes_groups`."""
    return IS_SUPPORTED


def record_ranges(ranges: Ranges | None) -> None:
    """See `ops.record_ranges`."""
    _Linear.ranges = None if ranges is None else staticmethod(ranges)
