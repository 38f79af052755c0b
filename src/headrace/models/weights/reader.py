"""Reads weights by name into tensors of the decoder's type and device, this rank's part of each."""

from __future__ import annotations

import math
import mmap
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.adapters import AdapterLimits
from headrace.config import Quantization
from headrace.dist.collectives import TensorGroup
from headrace.kernels import ops
from headrace.kernels.quantized import (
    Fp8Weight,
    GroupedWeight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    concatenate,
    kind_of,
    quantize,
)
from headrace.models.adapter_spec import is_adapted
from headrace.models.adapters import AdaptedLinear, empty_weights
from headrace.models.latent import rotary_order
from headrace.models.layers import Norm
from headrace.models.parallel import RowParallelLinear
from headrace.models.quantized import BITS, kept_in_16_bits
from headrace.models.rope import head_order
from headrace.models.shards import Shards
from headrace.models.sources import Progress
from headrace.models.spec import LatentSpec, Shape
from headrace.models.weights.source import ShardedSource, WeightSource
from headrace.models.weights.stored_linear import read_stored

_MAPPED_FROM_BYTES = 1 << 20
_EXPERTS_AT_ONCE = 16  # quantized: this takes several times their memory
_MANY_ROWS = 1 << 16  # fewer of them may keep their type with weights in FP8
_ROTATED = re.compile(r".*\.self_attn\.(q|k)_(proj|norm)\.(weight|bias)")
_ROTATED_OF_LATENTS = re.compile(r".*\.self_attn\.(q|q_b|kv_a)_proj\.weight")


@dataclass(frozen=True, slots=True)
class Matrix:
    """Matrices that share their input as they were read, their rows concatenated, before they are packed."""

    names: tuple[str, ...]
    weight: Tensor | QuantizedWeight  # [N, K]
    bias: Tensor | None  # [N]


class WeightReader:
    """Allocates tensors in the decoder's type and device, lets the source fill them, and counts their bytes."""

    def __init__(
        self,
        source: WeightSource,
        shards: Shards,
        dtype: torch.dtype,
        device: torch.device,
        *,
        quantization: Quantization | None,
        progress: Progress,
        group: TensorGroup | None,
        adapters: AdapterLimits | None = None,
    ) -> None:
        self._adapters = adapters
        self.source = ShardedSource(source, shards)
        self.shards = shards
        self.group = group
        self.num_bytes = 0
        self._spec = spec = shards.spec
        self._head_order = head_order(spec.head_dim, spec.rotary_dim, rotates_pairs=spec.rotates_pairs)
        self._scales = dict(spec.weight_scales)
        self._quantization = quantization  # of the layers' matrices, at load
        self._kept = kept_in_16_bits(shards.whole.num_layers)
        stored = spec.quantization
        self._dtype = dtype
        self.device = device
        self._takes_groups = ops.takes_groups(device, dtype)
        keeps = self._takes_groups if stored is None else stored.stays_packed_on(device.type)
        self._keeps_stored = keeps and quantization is None and not self._scales
        self._progress = progress
        self._num_read = 0  # bytes of all tensors so far, in the decoder's type
        self._num_to_read = dtype.itemsize * shards.num_params

    @property
    def is_plain_cpu(self) -> bool:
        return self.device.type == "cpu" and self._dtype == torch.float32

    def linear(self, *names: str, has_bias: bool) -> ops.PackedLinear:
        """Returns one GEMM for several matrices that share their input: their rows are concatenated."""
        return self.pack(self.matrix(*names, has_bias=has_bias))

    def matrix(self, *names: str, has_bias: bool) -> Matrix:
        """Reads what `pack` makes a GEMM of: quantized, where the checkpoint is and stays so."""
        bias = self.tensor(*(f"{name}.bias" for name in names)) if has_bias else None
        weights = tuple(f"{name}.weight" for name in names)
        stored = self._stored(weights) if self._keeps_stored else None
        return Matrix(names, self.tensor(*weights) if stored is None else stored, bias)

    def _stored(self, names: tuple[str, ...]) -> QuantizedWeight | None:
        stored = read_stored(self.source, names, self.device, self._row_order)
        if stored is not None:
            self._count_read(stored.values.numel())
        return stored

    def head(self, name: str, bias: Tensor | None) -> ops.PackedLinear | None:
        """Returns the head as a CPU multiplies it in its stored form, however the layers are quantized; None: it has
        no such form."""
        stored = self._stored((name,)) if self._takes_groups else None
        return None if stored is None else self._quantized_linear(stored, bias)

    def pack(self, matrix: Matrix) -> ops.PackedLinear:
        packed = self._packed(matrix)
        is_plain = self._adapters is None or not is_adapted(matrix.names[0])
        return packed if is_plain else self._adapted(packed, matrix.names)

    def _adapted(self, packed: ops.PackedLinear, names: tuple[str, ...]) -> AdaptedLinear:
        """Adds the tables of adapters to a layer."""
        assert self._adapters is not None
        stored = [f"{name}.weight" for name in names]
        sizes = tuple(self.source.shape(name)[0] for name in stored)
        weights = empty_weights(sizes, self.source.shape(stored[0])[1], self._adapters, self._dtype, self.device)
        self.num_bytes += weights.down.nbytes + weights.up.nbytes
        return AdaptedLinear(
            packed,
            names,
            weights,
            tuple(self._row_order(name, size) for name, size in zip(stored, sizes, strict=True)),
            tuple(self._scales.get(_name_in_layer(name), 1.0) for name in stored),
        )

    def _packed(self, matrix: Matrix) -> ops.PackedLinear:
        weight, bias = matrix.weight, matrix.bias
        if not isinstance(weight, Tensor):
            return self._quantized_linear(weight, bias)
        if f"{matrix.names[0]}.weight" in self._kept:
            return self.plain(weight, bias)
        kind = self._quantization
        if kind in ("int8", "int4"):
            return self._quantized_linear(quantize(weight, kind), bias, was_read=True)
        packed = ops.pack_linear(weight, bias, as_fp8=kind == "fp8")
        if packed.prefers_fp8(_MANY_ROWS):
            self.num_bytes -= weight.numel() * (self._dtype.itemsize - 1)
        return packed

    def _quantized_linear(
        self, weight: QuantizedWeight, bias: Tensor | None, *, was_read: bool = False
    ) -> ops.PackedLinear:
        """`was_read`: from a matrix whose bytes are counted."""
        num_params = weight.values.numel()
        self.num_bytes += _bytes_of(weight)
        if was_read:
            self.num_bytes -= num_params * self._dtype.itemsize
        return ops.pack_quantized(weight, bias, self._dtype)

    def _row_order(self, name: str, num_rows: int) -> Tensor | None:
        """Which row of the checkpoint is at each of ours; on the host. None: they are in order."""
        if self._spec.latent is not None:
            return self._row_order_of_latents(name, num_rows, self._spec.latent)
        if self._head_order is None or not _ROTATED.fullmatch(name):
            return None
        order = torch.tensor(self._head_order)
        return (torch.arange(0, num_rows, len(order))[:, None] + order).flatten()

    def _row_order_of_latents(self, name: str, num_rows: int, latent: LatentSpec) -> Tensor | None:
        """The rows that rotate are the last of each query head, and of the one key."""
        if not _ROTATED_OF_LATENTS.fullmatch(name):
            return None
        rows = torch.arange(num_rows).unflatten(0, (1 if ".kv_a_proj." in name else self._spec.num_heads, -1))
        rotated = rows[:, -latent.rotary_dim :]
        rotated.copy_(rotated[:, rotary_order(latent, rotates_pairs=self._spec.rotates_pairs)])
        order: Tensor = rows.flatten()
        return order

    def plain(self, weight: Tensor, bias: Tensor | None) -> ops.PackedLinear:
        """Returns the GEMM of a matrix that is not quantized: if the others are, with a copy for few rows."""
        if self._quantization is None and not self._keeps_stored:
            return ops.pack_linear(weight, bias)
        packed, num_copied = ops.pack_with_copy(weight, bias)
        self.num_bytes += num_copied
        return packed

    def row_linear(self, name: str, *, has_bias: bool, adds_up: bool = True) -> ops.PackedLinear:
        """Returns the GEMM of a matrix whose columns are divided over the ranks."""
        packed = self.linear(name, has_bias=has_bias and self.shards.has_row_biases)
        return packed if self.group is None or not adds_up else RowParallelLinear(packed, self.group)

    def experts(self, names: list[tuple[str, ...]], *, interleaved: bool = False) -> ops.PackedExperts:
        """Returns one grouped GEMM for the matrices of all experts; several matrices of one expert are concatenated
        by rows."""
        if (packed := self._quantized_experts(names, interleaved=interleaved)) is not None:
            return packed
        stack = self._stack(names, "weight", interleaved=interleaved)
        packed = ops.pack_experts(stack, as_fp8=self._quantization == "fp8")
        self.num_bytes += stack.numel() * (1 if packed.takes_fp8 else self._dtype.itemsize)
        return packed

    def _quantized_experts(self, names: list[tuple[str, ...]], *, interleaved: bool) -> ops.PackedExperts | None:
        """None: they are read in the type of the activations, and if the layers are in FP8, rounded to it."""
        weight: Fp8Weight | Int4Weight | None = None
        if not self._takes_groups and self._quantization == "int4":
            weight = self._experts_in_four_bits(names, interleaved=interleaved)
        elif interleaved:
            return None
        elif self._takes_groups:
            return self._each_expert(names) if self._keeps_stored or self._quantization is not None else None
        elif self._keeps_stored:
            weight = self._stored_experts(names)
        packed = None if weight is None else ops.pack_quantized_experts(weight, len(names), self._dtype)
        if packed is not None and weight is not None:
            self.num_bytes += _bytes_of(weight)
        return packed

    def _stored_experts(self, names: list[tuple[str, ...]]) -> Fp8Weight | Int4Weight | None:
        """[E * N, K], as the checkpoint has them; None: in a form without a kernel for experts, or they have no common
        one, such as blocks with rows of several matrices."""
        if self._spec.quantization is None or self._spec.quantization.kind == "int8":
            return None
        stored = read_stored(self.source, _weights_of(names), self.device, self._row_order)
        assert not isinstance(stored, Int8Weight | GroupedWeight)
        if stored is not None:
            self._count_read(stored.values.numel())
        return stored

    def _experts_in_four_bits(self, names: list[tuple[str, ...]], *, interleaved: bool) -> Int4Weight | None:
        parts = self._stack(names, "weight", interleaved=interleaved).split(_EXPERTS_AT_ONCE)
        weight = concatenate([quantize(part.flatten(0, 1), "int4") for part in parts])
        assert weight is None or isinstance(weight, Int4Weight)
        return weight

    def _each_expert(self, names: list[tuple[str, ...]]) -> ops.PackedExperts:
        linears = [self._packed(self.matrix(*parts, has_bias=False)) for parts in names]
        num_columns = sum(self.source.shape(f"{part}.weight")[0] for part in names[0])
        return ops.experts_of(linears, num_columns, self._dtype)

    def expert_biases(self, names: list[tuple[str, ...]], *, interleaved: bool = False) -> Tensor:  # [E, N]
        stack = self._stack(names, "bias", interleaved=interleaved)
        self.num_bytes += stack.nbytes
        return stack

    def _stack(self, names: list[tuple[str, ...]], kind: str, *, interleaved: bool) -> Tensor:
        """`interleaved`: rows 2i become the first half, rows 2i + 1 the second."""
        wholes = [tuple(f"{name}.{kind}" for name in parts) for parts in names]
        shapes = [self.source.shape(name) for name in wholes[0]]
        stack = allocate((len(names), sum(shape[0] for shape in shapes), *shapes[0][1:]), self._dtype, self.device)
        for expert, parts in zip(stack, wholes, strict=True):
            self._fill_rows(parts, expert)
            if interleaved:
                expert.copy_(torch.cat((expert[::2], expert[1::2])))
        return stack

    def norm(self, name: str) -> Norm:
        if self._spec.bare_norms:
            ones = torch.ones(self._spec.hidden_size, dtype=torch.float32, device=self.device)
            return Norm(ones, torch.zeros_like(ones), self._spec.norm_eps)
        weight = self.norm_weight(f"{name}.weight")
        bias = None
        if self._spec.layer_norm:
            bias = self.float32(f"{name}.bias") if self._spec.norm_bias else torch.zeros_like(weight)
        return Norm(weight, bias, self._spec.norm_eps)

    def norm_weight(self, name: str) -> Tensor:
        weight = self.float32(name)
        return weight.add_(self._spec.norm_offset) if self._spec.norm_offset else weight

    def float32(self, name: str) -> Tensor:
        """Reads a tensor in float32, whatever the decoder's type. For a norm's weight: adding the offset in a narrower
        type would lose digits."""
        out = allocate(self.source.shape(name), torch.float32, self.device)
        self._fill(name, out)
        self.num_bytes += out.nbytes
        return out

    def tensor(self, *names: str) -> Tensor:
        shapes = [self.source.shape(name) for name in names]
        num_rows = [shape[0] for shape in shapes]
        out = allocate((sum(num_rows), *shapes[0][1:]), self._dtype, self.device)
        self._fill_rows(names, out)
        self.num_bytes += out.nbytes
        return out

    def _fill_rows(self, names: tuple[str, ...], out: Tensor) -> None:
        num_rows = [self.source.shape(name)[0] for name in names]
        for name, part in zip(names, out.split(num_rows), strict=True):
            self._fill(name, part)

    def _fill(self, name: str, out: Tensor) -> None:
        self.source.fill(name, out)
        rows = out.view(-1) if "_norm." in name else out  # norms may have a row for each head
        order = None if out.is_meta else self._row_order(name, len(rows))
        if order is not None:
            rows.copy_(rows[order.to(rows.device)])
        if self._scales and (factor := self._scales.get(_name_in_layer(name))) is not None:
            out.mul_(factor)
        self._count_read(out.numel())

    def _count_read(self, num_params: int) -> None:
        self._num_read += num_params * self._dtype.itemsize
        self._progress(self._num_read, self._num_to_read)


def _weights_of(names: list[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(f"{part}.weight" for parts in names for part in parts)


def _bytes_of(weight: QuantizedWeight) -> int:
    """Bytes of the matrix once it is packed."""
    if isinstance(weight, GroupedWeight):
        return weight.num_bytes
    return int(weight.values.numel() * BITS[kind_of(weight)] / 8)


def _name_in_layer(name: str) -> str:
    """The name without the layer's prefix."""
    return name.split(".", maxsplit=3)[3] if name.startswith("model.layers.") else name


def allocate(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates a tensor. On a CPU each matrix has a mapping of its own, so memory that packing copied is returned
    to the system at once."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < _MAPPED_FROM_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)
