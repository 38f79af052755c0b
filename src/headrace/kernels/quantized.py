"""Weight matrices of eight and four bits: one form for each kind, and its arithmetic in plain PyTorch.

    Fp8Weight       float8_e4m3fn, one scale per output channel, or per block of 128 x 128 weights
    Int8Weight      int8, one scale per output channel; activations get one scale per row
    Int4Weight      four bits, one scale (and zero point) per group of weights of a row; activations keep their type
    GroupedWeight   four, six or eight bits, a scale and a minimum per group of weights of a row (GGUF); likewise

A weight is value * scale, for four bits (value - zero) * scale, of a GroupedWeight value * scale + minimum. Whatever
format a checkpoint has, its matrices become one of these while they are loaded; `ops.pack_quantized` packs them for
their device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX, INT8_MAX, INT4_MAX = 448.0, 127.0, 15
INT4_MIDDLE = 8  # the zero point of a symmetric group
OUTER_LEN = 256  # weights of a row that share an outer scale, in GGUF's K-quants
BLOCK_LEN = 128  # of FP8 weights with a scale per block, in rows and columns
_TINY = 1e-12  # scale of a row of zeros


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    values: Tensor  # [N, K] float8_e4m3fn
    scales: Tensor  # [N, 1] float32, or [ceil(N / 128), ceil(K / 128)]

    @property
    def has_blocks(self) -> bool:
        return self.scales.shape != (self.values.shape[0], 1)


@dataclass(frozen=True, slots=True)
class Int8Weight:
    values: Tensor  # [N, K] int8
    scales: Tensor  # [N, 1] float32


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """While it is loaded, each value has a byte of its own."""

    values: Tensor  # [N, K] uint8, 0 to 15
    scales: Tensor  # [N, K / group_len] float32
    zeros: Tensor | None = None  # [N, K / group_len] uint8; None: 8
    order: Tensor | None = None  # [K] int64: column k multiplies input order[k]; None: input k

    @property
    def group_len(self) -> int:
        return self.values.shape[1] // self.scales.shape[1]


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """While it is loaded, each value has a byte of its own. Scales and minima that a file stores as integers times an
    outer scale, one for OUTER_LEN weights, come with that, once for each group."""

    values: Tensor  # [N, K] uint8, below 2 ** bits
    scales: Tensor  # [N, K / group_len] float32
    minima: Tensor  # [N, K / group_len] float32
    bits: int  # 4, 6 or 8
    outer_scales: Tensor | None = None  # [N, K / group_len] float32
    outer_minima: Tensor | None = None

    @property
    def group_len(self) -> int:
        return self.values.shape[1] // self.scales.shape[1]

    @property
    def stored_scales(self) -> StoredScales:
        """Scales and minima in the narrowest form that holds them exactly."""
        zero = self._zero()
        scales = self._in_bytes(self.scales, self.outer_scales)
        if scales is not None and zero is not None:
            return StoredScales(scales[0], None, scales[1], None, zero)
        minima = self._in_bytes(self.minima, self.outer_minima)
        if scales is not None and minima is not None:
            return StoredScales(scales[0], minima[0], scales[1], minima[1], None)
        numbers = [self.scales, self.minima] if zero is None else [self.scales]
        if all(torch.equal(each.half().float(), each) for each in numbers):
            numbers = [each.half() for each in numbers]
        return StoredScales(numbers[0], numbers[1] if zero is None else None, None, None, zero)

    def _zero(self) -> int | None:
        """The integer whose negative multiplies each scale to its minimum, if there is one."""
        place = self.scales.abs().argmax()
        zero = (-self.minima.flatten()[place] / self.scales.flatten()[place]).nan_to_num().round().item()
        is_symmetric = 0 <= zero < 2**self.bits and torch.equal(self.minima, self.scales * -zero)
        return int(zero) if is_symmetric else None

    def _in_bytes(self, numbers: Tensor, outer: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Integers of eight bits and half-precision numbers that give these, one for OUTER_LEN weights."""
        if outer is None or self.values.shape[1] % OUTER_LEN or OUTER_LEN % self.group_len:
            return None
        once = outer.unflatten(1, (-1, OUTER_LEN // self.group_len))[:, :, :1].half()  # [N, K / OUTER_LEN, 1]
        known = once.float().expand(-1, -1, OUTER_LEN // self.group_len).flatten(1)
        inner = (numbers / known).nan_to_num(0.0).round().clamp(-128, 127)
        return (inner.to(torch.int8), once[:, :, 0]) if torch.equal(inner * known, numbers) else None

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed matrix."""
        stored = [each for each in self.stored_scales[:4] if each is not None]
        return self.values.numel() * self.bits // 8 + sum(each.nbytes for each in stored)


class StoredScales(NamedTuple):
    """Float16 or float32; or int8, to be multiplied by the outer scale of their OUTER_LEN weights."""

    scales: Tensor  # [N, groups]
    minima: Tensor | None  # likewise; None: each is -zero times its scale
    outer_scales: Tensor | None  # [N, K / OUTER_LEN] float16
    outer_minima: Tensor | None
    zero: int | None


Kind = Literal["fp8", "int8", "int4"]
QuantizedWeight = Fp8Weight | Int8Weight | Int4Weight | GroupedWeight


def dequantize(weight: QuantizedWeight) -> Tensor:
    """Returns the matrix in float32, with its columns in the order of the input."""
    if isinstance(weight, Int8Weight):
        return weight.values.float() * weight.scales
    if isinstance(weight, Fp8Weight):
        return weight.values.float() * (block_scales_per_weight(weight) if weight.has_blocks else weight.scales)
    if isinstance(weight, GroupedWeight):
        groups = weight.values.float().unflatten(1, (-1, weight.group_len))
        scaled: Tensor = groups * weight.scales.unsqueeze(-1) + weight.minima.unsqueeze(-1)
        return scaled.flatten(1)
    zeros = float(INT4_MIDDLE) if weight.zeros is None else weight.zeros.float().unsqueeze(-1)
    groups = weight.values.float().unflatten(1, (-1, weight.group_len))
    matrix: Tensor = ((groups - zeros) * weight.scales.unsqueeze(-1)).flatten(1)
    if weight.order is None:
        return matrix
    return torch.empty_like(matrix).index_copy_(1, weight.order, matrix)


def grouped(weight: Int4Weight) -> GroupedWeight:
    """Returns the same weights with minima instead of zero points, their columns in the order of the groups."""
    zeros = float(INT4_MIDDLE) if weight.zeros is None else weight.zeros.float()
    return GroupedWeight(weight.values, weight.scales, weight.scales * -zeros, bits=4)


def block_scales_per_weight(weight: Fp8Weight) -> Tensor:  # [N, K]
    num_rows, width = weight.values.shape
    rows = weight.scales.repeat_interleave(BLOCK_LEN, 0)[:num_rows]
    return rows.repeat_interleave(BLOCK_LEN, 1)[:, :width]


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Returns matrices with the same input as one, their rows concatenated; None: they have no common form."""
    first = weights[0]
    if len(weights) == 1:
        return first
    if isinstance(first, Fp8Weight):
        return _concatenate_fp8([each for each in weights if isinstance(each, Fp8Weight)], len(weights))
    if isinstance(first, Int8Weight):
        same = [each for each in weights if isinstance(each, Int8Weight)]
        if len(same) < len(weights):
            return None
        return Int8Weight(torch.cat([each.values for each in same]), torch.cat([each.scales for each in same]))
    if isinstance(first, GroupedWeight):
        return _concatenate_groups([each for each in weights if isinstance(each, GroupedWeight)], len(weights))
    return _concatenate_int4([each for each in weights if isinstance(each, Int4Weight)], len(weights))


def _concatenate_fp8(weights: list[Fp8Weight], expected: int) -> Fp8Weight | None:
    if len(weights) < expected or len({each.has_blocks for each in weights}) > 1:
        return None
    is_uneven = any(len(each.values) % BLOCK_LEN for each in weights[:-1])
    if weights[0].has_blocks and is_uneven:
        return None  # a block would have rows of two matrices
    values = torch.cat([each.values.view(torch.uint8) for each in weights]).view(FP8)
    return Fp8Weight(values, torch.cat([each.scales for each in weights]))


def _concatenate_int4(weights: list[Int4Weight], expected: int) -> Int4Weight | None:
    first = weights[0]
    if len(weights) < expected or any(not _has_same_groups(first, each) for each in weights):
        return None
    has_zeros = any(each.zeros is not None for each in weights)
    zeros = [
        torch.full_like(each.scales, INT4_MIDDLE, dtype=torch.uint8) if each.zeros is None else each.zeros
        for each in weights
    ]
    return Int4Weight(
        torch.cat([each.values for each in weights]),
        torch.cat([each.scales for each in weights]),
        torch.cat(zeros) if has_zeros else None,
        first.order,
    )


def _concatenate_groups(weights: list[GroupedWeight], expected: int) -> GroupedWeight | None:
    """Matrices of four bits get eight where others have them, and long groups are divided into short ones."""
    if len(weights) < expected:
        return None
    group_len = math.gcd(*(each.group_len for each in weights))
    parts = [with_group_len(each, group_len) for each in weights]
    values, scales, minima = (
        torch.cat(each) for each in zip(*((part.values, part.scales, part.minima) for part in parts), strict=True)
    )
    outer = (_concatenated([part.outer_scales for part in parts]), _concatenated([part.outer_minima for part in parts]))
    return GroupedWeight(values, scales, minima, max(part.bits for part in parts), *outer)


def _concatenated(tensors: list[Tensor | None]) -> Tensor | None:
    present = [each for each in tensors if each is not None]
    return torch.cat(present) if len(present) == len(tensors) else None


def with_group_len(weight: GroupedWeight, group_len: int) -> GroupedWeight:
    """Returns the same weights in shorter groups, whose length divides that of the longer ones."""
    times = weight.group_len // group_len
    return weight if times == 1 else of_each_scale(weight, lambda each: each.repeat_interleave(times, 1))


def of_each_scale(weight: GroupedWeight, change: Callable[[Tensor], Tensor]) -> GroupedWeight:
    """Returns the weight with all tensors of its groups changed in the same way."""
    outer = (None if each is None else change(each) for each in (weight.outer_scales, weight.outer_minima))
    return GroupedWeight(weight.values, change(weight.scales), change(weight.minima), weight.bits, *outer)


def _has_same_groups(one: Int4Weight, other: Int4Weight) -> bool:
    if one.group_len != other.group_len or (one.order is None) != (other.order is None):
        return False
    return one.order is None or (other.order is not None and torch.equal(one.order, other.order))


def take_rows(weight: QuantizedWeight, rows: Tensor) -> QuantizedWeight | None:  # [N] int64, on the host
    """Returns the rows in another order; None: rows of different blocks would be mixed."""
    if isinstance(weight, Fp8Weight) and weight.has_blocks and not _stay_in_blocks(rows):
        return None
    rows = rows.to(weight.values.device)
    if isinstance(weight, Fp8Weight):
        scales = weight.scales if weight.has_blocks else weight.scales[rows]
        return Fp8Weight(weight.values.view(torch.uint8)[rows].view(FP8), scales)
    if isinstance(weight, Int8Weight):
        return Int8Weight(weight.values[rows], weight.scales[rows])
    if isinstance(weight, GroupedWeight):
        return replace(of_each_scale(weight, lambda each: each[rows]), values=weight.values[rows])
    zeros = None if weight.zeros is None else weight.zeros[rows]
    return replace(weight, values=weight.values[rows], scales=weight.scales[rows], zeros=zeros)


def _stay_in_blocks(rows: Tensor) -> bool:
    return torch.equal(rows // BLOCK_LEN, torch.arange(len(rows), device=rows.device) // BLOCK_LEN)


def kind_of(weight: Fp8Weight | Int8Weight | Int4Weight) -> Kind:
    return "int4" if isinstance(weight, Int4Weight) else "int8" if isinstance(weight, Int8Weight) else "fp8"


def quantize(weight: Tensor, kind: Kind) -> QuantizedWeight:  # [N, K]
    """Quantizes without data: to nearest, with the largest groups of four bits that divide the rows."""
    if kind == "int8":
        return quantize_int8(weight)
    if kind == "fp8":
        return quantize_fp8(weight)
    return quantize_int4(weight, group_len_of(weight.shape[1]))


def group_len_of(width: int) -> int:
    """The length of groups of four bits in rows of this width: 128, or less where that does not divide them."""
    return next((size for size in (128, 64, 32) if width % size == 0), width)


def quantize_int8(weight: Tensor) -> Int8Weight:  # [N, K]
    """Rounds each row to nearest, with its own scale."""
    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True).clamp_(min=_TINY) / INT8_MAX
    return Int8Weight((wide / scales).round_().to(torch.int8), scales)


def quantize_fp8(weight: Tensor) -> Fp8Weight:  # [N, K]
    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True).clamp_(min=_TINY) / FP8_MAX
    return Fp8Weight((wide / scales).to(FP8), scales)


# Shares of a group's largest weight at which the range may end. Clipping it costs that weight, and gives all others
# smaller steps; the share with the least squared error is taken.
_CLIPS = (1.07, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


def quantize_int4(weight: Tensor, group_len: int = 128, *, has_zeros: bool = False) -> Int4Weight:
    """Rounds to nearest in groups of `group_len` weights of a row, with the clip of the least squared error;
    `has_zeros`: with a zero point for each group, else symmetric."""
    groups = weight.float().unflatten(1, (-1, group_len))  # [N, G, group_len]
    high, low = groups.amax(-1).clamp_(min=_TINY), groups.amin(-1).clamp_(max=-_TINY)
    if not has_zeros:
        high = torch.maximum(high, -low)
        low = -high
    zeros = (-low * (INT4_MAX / (high - low))).round_().unsqueeze(-1)
    if not has_zeros:
        zeros.fill_(INT4_MIDDLE)  # rounding would give 7 for some groups
    least = torch.full(groups.shape[:2], float("inf"), device=weight.device)
    values = torch.zeros(groups.shape, dtype=torch.uint8, device=weight.device)
    scales = torch.zeros(groups.shape[:2], device=weight.device)
    for clip in _CLIPS:
        scale = (high - low) * (clip / INT4_MAX)
        rounded = (groups / scale.unsqueeze(-1)).round_().add_(zeros).clamp_(0, INT4_MAX)
        error = ((rounded - zeros) * scale.unsqueeze(-1) - groups).square_().sum(-1)
        is_better = error < least
        least = torch.where(is_better, error, least)
        scales = torch.where(is_better, scale, scales)
        values = torch.where(is_better.unsqueeze(-1), rounded.to(torch.uint8), values)
    return Int4Weight(values.flatten(1), scales, zeros.squeeze(-1).to(torch.uint8) if has_zeros else None)


def quantize_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:  # [T, K] -> int8, [T, 1] float32
    """Quantizes activations, each row with its own scale."""
    wide = x.float()
    scales = wide.abs().amax(1, keepdim=True).clamp_(min=_TINY) / INT8_MAX
    return (wide / scales).round_().to(torch.int8), scales


def quantize_groups_fp8(x: Tensor) -> tuple[Tensor, Tensor]:  # [T, K] -> float8, [T, ceil(K / 128)] float32
    """Quantizes activations, each 128 columns of a row with their own scale."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % BLOCK_LEN)).unflatten(1, (-1, BLOCK_LEN))
    scales = padded.abs().amax(-1).clamp_(min=_TINY) / FP8_MAX
    return (padded / scales.unsqueeze(-1)).flatten(1)[:, : x.shape[1]].to(FP8), scales


class Int8Linear:
    """The reference of INT8 GEMMs: INT8 weights times INT8 activations, sums exact, scales applied to the sums."""

    def __init__(self, weight: Int8Weight, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._weight, self._bias, self._dtype = weight, bias, dtype

    def __call__(self, x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        values, scales = quantize_rows_int8(x)
        out = (values.double() @ self._weight.values.double().t()).float() * scales * self._weight.scales.t()
        return (out if self._bias is None else out + self._bias.float()).to(self._dtype)


class Fp8BlockLinear:
    """The reference of FP8 GEMMs with scales per block: activations have a scale for each 128 columns of a row."""

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._weight, self._bias, self._dtype = dequantize(weight), bias, dtype

    def __call__(self, x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        values, scales = quantize_groups_fp8(x)
        wide = values.float() * scales.repeat_interleave(BLOCK_LEN, 1)[:, : x.shape[1]]
        out = wide @ self._weight.t()
        return (out if self._bias is None else out + self._bias.float()).to(self._dtype)
