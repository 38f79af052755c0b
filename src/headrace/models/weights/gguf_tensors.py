"""Weights from a GGUF file: a few rows at a time, reordered, and dequantized straight into their final tensor, or as
groups of integers for a CPU."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from headrace.errors import ModelError
from headrace.models.gguf_file import GgufFile, GgufTensor
from headrace.models.quantized import PackedBits
from headrace.models.spec import ModelSpec, Shape
from headrace.models.stored_tensors import StoredPart
from headrace.models.weights.dequantize import Bytes, dequantize, is_block_type
from headrace.models.weights.gguf_groups import TYPES, GroupedType
from headrace.models.weights.gguf_names import (
    LAYER_NAME,
    OF_EXPERTS,
    OF_STREAMS,
    PART_OF_SPEC,
    VECTORS,
    Array,
    Computed,
    computed_tensors,
    fused_in,
    is_unused,
    name_outside,
    names_in_layer,
    used_by,
)
from headrace.models.weights.quantized_files import part_of
from headrace.models.weights.source import Slice, StoredRows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headrace.kernels.quantized import GroupedWeight, QuantizedWeight

_FLOAT_BITS = 32.0
_ELEMENTS_AT_ONCE = 1 << 18  # small enough for a core's cache
_ROTATED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")


class GgufTensors:
    """Reads tensors by our names. `rotates_pairs`: query and key rows are stored for rotation in neighbouring pairs;
    ours rotates halves of a head."""

    def __init__(self, file: GgufFile, spec: ModelSpec, *, rotates_pairs: bool) -> None:
        self._file = file
        self._spec = spec
        self._head_dim = spec.head_dim
        self._in_layer = names_in_layer(file.tensors, spec)
        self._computed = computed_tensors(file.tensors, spec)
        self._rotates_pairs = rotates_pairs
        self._bytes_read = 0

    def names(self) -> Collection[str]:
        return self._parts.keys() | self._computed.keys()

    def shape(self, name: str) -> Shape:
        if (computed := self._computed.get(name)) is not None:
            return computed.shape(*(self._file.tensors[stored].shape for stored in computed.stored))
        part = self._parts[name]
        shape = part.shape(self._file.tensors[part.name].shape)
        return (1, *shape) if _is_lone_row(name) and len(shape) == 1 else shape

    @property
    def num_bytes_read(self) -> int:
        return self._bytes_read

    @property
    def file_reader(self) -> None:
        return None

    def fill(self, name: str, out: Tensor, part: Slice | None = None) -> None:
        """Rows are read as they are stored: of a part of their columns too, a rank reads whole rows."""
        if (computed := self._computed.get(name)) is not None:
            return self._fill_computed(computed, out, part)
        stored = self._parts[name]
        tensor = self._file.tensors[stored.name]
        if stored.is_vector:
            return self._fill_vector(stored, out, part)
        if stored.num_groups > 1:
            return self._fill_grouped(stored, out, part)
        out = out[0] if _is_lone_row(name) and len(tensor.shape) == 1 else out
        first_row = _first_row(stored) + (0 if part is None else part.rows.start)
        columns = None if part is None else part.columns

        def fill(start: int, count: int) -> None:
            self._fill_rows(tensor, first_row + start, out[start : start + count], columns)

        self._in_pieces(len(out), 1 if len(tensor.shape) == 1 else tensor.shape[-1], fill)
        self._bytes_read += len(out) * _row_bytes(tensor)

    def _in_pieces(self, num_rows: int, row_len: int, work: Callable[[int, int], None]) -> None:
        """Calls `work` with the first row and the number of rows of each piece, on all cores: numpy releases the
        GIL."""
        at_once = max(1, _ELEMENTS_AT_ONCE // (row_len * self._head_dim)) * self._head_dim  # whole heads
        starts = range(0, num_rows, at_once)
        with ThreadPoolExecutor(max_workers=_num_cores()) as pool:
            for _ in pool.map(work, starts, (min(at_once, num_rows - start) for start in starts)):
                pass  # raises what a thread raised

    def quantized(self, name: str, device: torch.device, part: Slice | None = None) -> QuantizedWeight | None:
        """Returns a matrix, or a part of it, in groups of integers, which only a CPU multiplies; None: it is stored in
        another form, or the part cuts through groups."""
        stored = self._parts.get(name)
        kind = None if stored is None else TYPES.get(self._file.tensors[stored.name].type_name)
        if device.type != "cpu" or stored is None or kind is None or stored.is_vector or stored.num_groups > 1:
            return None
        return part_of(self._read_groups(stored, kind), part)

    def _read_groups(self, stored: StoredPart, kind: GroupedType) -> GroupedWeight:
        import torch

        from headrace.kernels.quantized import GroupedWeight

        tensor = self._file.tensors[stored.name]
        num_rows, width = stored.num_rows, tensor.shape[-1]
        values = np.empty((num_rows, width), np.uint8)
        of_groups = np.empty((4 if kind.has_outer else 2, num_rows, width // kind.group_len), np.float32)

        def unpack(start: int, count: int) -> None:
            blocks = self._read_in_order(tensor, _first_row(stored) + start, count).reshape(-1, kind.block_bytes)
            found, end = kind.unpack(blocks), start + count
            values[start:end] = found.values.reshape(count, -1)
            for target, each in zip(of_groups, found[1:], strict=False):  # an outer number is that of all its groups
                of_blocks = target[start:end].reshape(len(blocks), -1)
                of_blocks[:] = each

        self._in_pieces(num_rows, width, unpack)
        self._bytes_read += num_rows * _row_bytes(tensor)
        scales, minima, *outer = torch.from_numpy(of_groups).unbind()
        return GroupedWeight(torch.from_numpy(values), scales, minima, kind.bits, *outer)

    def _fill_vector(self, stored: StoredPart, out: Tensor, part: Slice | None) -> None:
        """Fills a vector that is a row of a stored matrix: the bias of one expert."""
        import torch

        tensor = self._file.tensors[stored.name]
        exact = np.empty((1, stored.num_rows), dtype=np.float32)
        dequantize(self._read_rows(tensor, stored.member or 0, 1), tensor.type_name, exact)
        rows = range(stored.num_rows) if part is None else part.rows
        out.copy_(torch.from_numpy(exact[0, rows.start : rows.stop]))
        self._bytes_read += _row_bytes(tensor)

    def _fill_computed(self, computed: Computed, out: Tensor, part: Slice | None) -> None:
        import torch

        stored = [self._read_whole(self._file.tensors[name]) for name in computed.stored]
        whole = torch.from_numpy(np.ascontiguousarray(computed.compute(*stored)))
        out.copy_(whole if part is None else part.of(whole))

    def _read_whole(self, tensor: GgufTensor) -> Array:
        raw = self._read_rows(tensor, 0, tensor.num_rows)
        exact = np.empty((tensor.num_rows, math.prod(tensor.shape) // tensor.num_rows), np.float32)
        dequantize(raw, tensor.type_name, exact)
        self._bytes_read += raw.nbytes
        return exact.reshape(tensor.shape)

    def _fill_grouped(self, stored: StoredPart, out: Tensor, part: Slice | None) -> None:
        """Fills rows that are some of each group of stored rows."""
        import torch

        tensor = self._file.tensors[stored.name]
        raw = self._read_rows(tensor, 0, tensor.num_rows).reshape(stored.num_groups, stored.rows_per_group, -1)
        rows = np.ascontiguousarray(raw[:, stored.first_row : stored.first_row + stored.num_rows])
        exact = np.empty((stored.num_groups * stored.num_rows, tensor.shape[-1]), np.float32)
        dequantize(rows.reshape(len(exact), -1), tensor.type_name, exact)
        whole = torch.from_numpy(exact)
        out.copy_(whole if part is None else part.of(whole))
        self._bytes_read += rows.nbytes

    def stored_rows(self, name: str, part: Slice | None = None) -> StoredRows | None:
        stored = self._parts[name]
        tensor = self._file.tensors[stored.name]
        if not is_block_type(tensor.type_name):
            return None
        rows = range(stored.num_rows) if part is None else part.rows
        raw = self._read_rows(tensor, _first_row(stored) + rows.start, len(rows))
        self._bytes_read += raw.nbytes
        return StoredRows(raw, tensor.type_name)

    def _fill_rows(self, tensor: GgufTensor, start: int, out: Tensor, columns: range | None) -> None:
        import torch

        raw = self._read_in_order(tensor, start, len(out))
        if out.dtype == torch.float32 and out.device.type == "cpu" and columns is None:
            dequantize(raw, tensor.type_name, out.numpy())
        else:
            exact = np.empty((len(out), *tensor.shape[-1:]) if columns else out.shape, dtype=np.float32)
            dequantize(raw, tensor.type_name, exact)
            out.copy_(torch.from_numpy(exact[:, columns.start : columns.stop] if columns else exact))

    def _read_in_order(self, tensor: GgufTensor, start: int, num_rows: int) -> Bytes:
        """Reads rows, those of whole heads in our order."""
        raw = self._read_rows(tensor, start, num_rows)
        is_rotated = self._rotates_pairs and _ROTATED.fullmatch(tensor.name)
        return _pairs_to_halves(raw, self._head_dim) if is_rotated else raw

    def _read_rows(self, tensor: GgufTensor, start: int, num_rows: int) -> Bytes:
        row_bytes = _row_bytes(tensor)
        count, offset = num_rows * row_bytes, tensor.offset + start * row_bytes
        raw = np.fromfile(self._file.path, dtype=np.uint8, count=count, offset=offset)
        if len(raw) < count:
            raise ModelError(f"{self._file.path} is truncated in tensor {tensor.name!r}; fetch it again")
        return raw.reshape(num_rows, row_bytes)

    @cached_property
    def _parts(self) -> dict[str, StoredPart]:
        """Maps Hugging Face's names to stored tensors; unknown tensors keep their names, and are refused later."""
        found: dict[str, StoredPart] = {}
        for tensor in self._file.tensors.values():
            if tensor.name.removesuffix(".weight") not in PART_OF_SPEC and not self._is_of_extra_layer(tensor.name):
                found |= self._parts_in(tensor)
        used = used_by(self._computed)
        return {name: part for name, part in found.items() if name not in used and name not in self._computed}

    def _is_of_extra_layer(self, name: str) -> bool:
        """Whether it belongs to a layer that predicts further tokens, which come after the others."""
        layer = re.match(r"blk\.(\d+)\.", name)
        return layer is not None and int(layer[1]) >= self._spec.num_layers

    def _parts_in(self, tensor: GgufTensor) -> dict[str, StoredPart]:
        num_rows = tensor.shape[0]
        match = LAYER_NAME.fullmatch(tensor.name)
        if tensor.name in OF_STREAMS and len(tensor.shape) == 3:
            return _stack_parts(tensor, OF_STREAMS[tensor.name], tensor.shape[0])
        if match is None:
            return {name_outside(tensor.name, self._spec): StoredPart(tensor.name, 0, num_rows, num_rows)}
        index, stem, kind = match.groups()
        if is_unused(stem, int(index), self._spec):
            return {}
        is_matrix = kind == "weight"
        if stem in OF_EXPERTS and self._spec.has_mixture(int(index)) and len(tensor.shape) == (3 if is_matrix else 2):
            assert self._spec.mixture is not None
            name = f"model.layers.{index}.mlp.experts.*.{OF_EXPERTS[stem]}.{kind}"
            return _stack_parts(tensor, name, self._spec.mixture.num_experts)
        fused = fused_in(stem, int(index), self._file.tensors, self._spec)
        if fused is not None:
            names = [f"model.layers.{index}.{part}.{kind}" for part in fused.names]
            return self._fused_parts_of(tensor, names, fused.num_groups)
        if stem not in self._in_layer:
            return {tensor.name: StoredPart(tensor.name, 0, num_rows, num_rows)}
        kind = "bias" if stem in VECTORS else kind
        return {
            f"model.layers.{index}.{self._in_layer[stem]}.{kind}": StoredPart(tensor.name, 0, num_rows, num_rows),
        }

    def _fused_parts_of(self, tensor: GgufTensor, names: list[str], num_groups: int) -> dict[str, StoredPart]:
        """Splits a fused tensor: the rows of the first matrix, then of the second, with the counts of the spec."""
        shapes = self._shapes
        counts = [shapes[name][0] // num_groups if name in shapes else 0 for name in names]
        ends = accumulate(counts)
        return {
            name: StoredPart(tensor.name, end - count, count, sum(counts), num_groups)
            for name, count, end in zip(names, counts, ends, strict=True)
        }

    @cached_property
    def _shapes(self) -> dict[str, Shape]:
        return self._spec.tensor_shapes()


def _stack_parts(tensor: GgufTensor, name: str, num_members: int) -> dict[str, StoredPart]:
    """Splits a stack, such as that of all experts. `name` has a star for the number of the member. `StoredPart.shape`
    checks their count."""
    num_rows = tensor.shape[1]  # of a bias: its elements
    return {
        name.replace("*", str(member)): StoredPart(
            tensor.name,
            0,
            num_rows,
            num_rows,
            member=member,
            num_members=num_members,
            is_vector=len(tensor.shape) == 2,
        )
        for member in range(num_members)
    }


def _is_lone_row(name: str) -> bool:
    """Whether it is a matrix of one row, which files store as a vector."""
    return name.endswith((".mlp.shared_expert_gate.weight", "model.embed_types.weight", "head.1.weight"))


def _first_row(part: StoredPart) -> int:
    return part.first_row + (part.member or 0) * part.rows_per_group


def _row_bytes(tensor: GgufTensor) -> int:
    return tensor.num_bytes // tensor.num_rows


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pairs_to_halves(raw: Bytes, head_dim: int) -> Bytes:
    """Reorders rows of each head from (0, half, 1, half + 1, ...) to (0, 1, ..., half, half + 1, ...)."""
    num_rows, row_bytes = raw.shape
    heads = raw.reshape(num_rows // head_dim, head_dim // 2, 2, row_bytes)
    return heads.swapaxes(1, 2).reshape(num_rows, row_bytes)


def rope_tensors(file: GgufFile) -> dict[str, tuple[float, ...]]:
    """Returns rope parameters that GGUF stores as tensors: one or two sets of frequency divisors."""
    found = {}
    for stem in PART_OF_SPEC:
        tensor = file.tensors.get(f"{stem}.weight")
        if tensor is not None:
            found[stem] = _read_floats(file, tensor)
    return found


def _read_floats(file: GgufFile, tensor: GgufTensor) -> tuple[float, ...]:
    if tensor.type_name != "F32":
        raise ModelError(f"tensor {tensor.name!r} must be stored as F32, found {tensor.type_name}")
    values = np.fromfile(file.path, dtype="<f4", count=tensor.num_bytes // 4, offset=tensor.offset)
    return tuple(float(value) for value in values)


def packed_bits(file: GgufFile, spec: ModelSpec) -> PackedBits | None:
    """What `quantized` and `stored_rows` leave in the memory of a CPU; None: weights are scaled at load, and so
    dequantized, or the file has no embeddings and will be refused."""
    table = file.tensors.get("token_embd.weight")
    if spec.weight_scales or table is None:
        return None
    layers = [tensor for tensor in file.tensors.values() if LAYER_NAME.fullmatch(tensor.name) and len(tensor.shape) > 1]
    head = file.tensors.get("output.weight", table)
    num_weights = sum(math.prod(tensor.shape) for tensor in layers)
    num_bits = sum(math.prod(tensor.shape) * _bits_on_cpu(tensor) for tensor in layers)
    return PackedBits(
        layers=num_bits / max(1, num_weights),
        head=_FLOAT_BITS if spec.norms_head else _bits_on_cpu(head),
        embeddings=8 * table.num_bytes / math.prod(table.shape) if is_block_type(table.type_name) else _FLOAT_BITS,
    )


def _bits_on_cpu(tensor: GgufTensor) -> float:
    kind = TYPES.get(tensor.type_name)
    return _FLOAT_BITS if kind is None else kind.bits_per_weight


def stored_dtype(file: GgufFile) -> str:
    """Returns the type of the matrices; quantized ones count as bfloat16, which covers their range.

    Routers do not count: converters leave them in float32.
    """
    names = {"F32": "float32", "F16": "float16"}
    matrices = [tensor for tensor in file.tensors.values() if len(tensor.shape) > 1]
    kinds = {tensor.type_name for tensor in matrices if ".ffn_gate_inp." not in tensor.name}
    return names.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"
