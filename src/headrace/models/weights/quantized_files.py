"""Safetensors with quantized matrices, in the layouts that `models/quantized.py` lists.

Each matrix appears under the name of its unquantized form. It is read as stored (`quantized`), or dequantized
(`fill`): for ranks, families and parts of the model that need other rows, columns or types than the stored ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from headrace.errors import ModelError, UnsupportedModelError
from headrace.models.quantized import StoredQuantization
from headrace.models.spec import Shape
from headrace.models.weights.file_reader import FileReader
from headrace.models.weights.safetensors_files import Region, SafetensorsFiles
from headrace.models.weights.source import Slice, StoredRows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headrace.kernels.quantized import Int4Weight, QuantizedWeight

_WEIGHT = ".weight"
_PACKED = {"compressed-tensors": ".weight_packed", "awq": ".qweight", "gptq": ".qweight"}
_HELPERS = (  # what belongs to a quantized matrix, or to a quantized cache that is not used
    *(".weight_scale", ".weight_scale_inv", ".weight_zero_point", ".weight_shape", ".weight_g_idx", ".input_scale"),
    *(".input_zero_point", ".qzeros", ".scales", ".g_idx", ".k_scale", ".v_scale", ".q_scale", ".prob_scale"),
)
_EIGHT_BITS = ("F8_E4M3", "I8")
_PER_WORD = 8  # values of four bits in 32
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # value j of a word is at bits 4 * order[j]
_BLOCK_LEN = 128


class QuantizedFiles:
    """Reads quantized matrices, and passes other tensors through."""

    def __init__(self, files: SafetensorsFiles, quantization: StoredQuantization) -> None:
        self._files = files
        self._quantization = quantization

    def names(self) -> Collection[str]:
        plain = [name for name in self._files.names() if not name.endswith(_HELPERS)]
        return [*(name for name in plain if not self._is_packed(name)), *self._packed]

    def shape(self, name: str) -> Shape:
        if name not in self._packed:
            return self._files.shape(name)
        stem = name.removesuffix(_WEIGHT)
        first, second = self._files.shape(stem + self._suffix)
        if self._quantization.method == "awq":
            return (second * _PER_WORD, first)
        if self._quantization.method == "gptq":
            return (second, first * _PER_WORD)
        return (first, self._packed_width(stem))

    def fill(self, name: str, out: Tensor, part: Slice | None = None) -> None:
        if not self._is_quantized(name):
            self._files.fill(name, out, part)
            return
        whole = self._dequantized(name, out.device)
        out.copy_(whole if part is None else part.of(whole))

    def fill_regions(self, name: str, out: Tensor, regions: Iterable[Region]) -> None:
        if not self._is_quantized(name):
            self._files.fill_regions(name, out, regions)
            return
        whole = self._dequantized(name, out.device)
        for region in regions:
            piece = Slice(region.rows, region.columns).of(whole)
            piece = piece.t() if region.is_transposed else piece
            out[region.first_row : region.first_row + len(piece)].copy_(piece)

    def read_ahead(self, name: str) -> None:
        if not self._is_quantized(name):
            self._files.read_ahead(name)

    def stored_rows(self, name: str, part: Slice | None = None) -> StoredRows | None:
        return None

    @property
    def num_bytes_read(self) -> int:
        return self._files.num_bytes_read

    @property
    def file_reader(self) -> FileReader | None:
        """None: the tensors of a matrix are read one after the other, not announced."""
        return None

    def quantized(self, name: str, device: torch.device, part: Slice | None = None) -> QuantizedWeight | None:
        """Returns the matrix, or a part of it, as stored; None: it is not quantized, or the part cuts through groups
        of weights that share a scale."""
        if not self._is_quantized(name) or not self._quantization.stays_packed:
            return None
        return part_of(self._read(name, device), part)

    def _dequantized(self, name: str, device: torch.device) -> Tensor:
        from headrace.kernels.quantized import dequantize

        return dequantize(self._read(name, device))

    def _read(self, name: str, device: torch.device) -> QuantizedWeight:
        stem = name.removesuffix(_WEIGHT)
        if self._quantization.method == "awq":
            return self._read_awq(stem, device)
        if self._quantization.method == "gptq":
            return self._read_gptq(stem, device)
        if name in self._packed:
            return self._read_packed(stem, device)
        return self._read_eight_bits(stem, device)

    def _read_eight_bits(self, stem: str, device: torch.device) -> QuantizedWeight:
        from headrace.kernels.quantized import Fp8Weight, Int8Weight

        if len(self._files.shape(stem + _WEIGHT)) != 2:
            raise UnsupportedModelError(f"{stem + _WEIGHT!r} is a quantized stack of matrices, which is not supported")
        values = self._tensor(stem + _WEIGHT, device)
        is_block = stem + ".weight_scale_inv" in self._stored_names
        name = stem + (".weight_scale_inv" if is_block else ".weight_scale")
        if name not in self._stored_names:
            raise ModelError(f"tensor {stem + _WEIGHT!r} is quantized, and its scales {name!r} are missing")
        num_rows, width = values.shape
        scales, shape = self._tensor(name, device).float(), self._files.shape(name)
        if scales.numel() == 1:
            scales = scales.view(1, 1).expand(num_rows, 1)
        elif scales.numel() == num_rows:
            scales = scales.view(num_rows, 1)
        elif shape != (-(-num_rows // _BLOCK_LEN), -(-width // _BLOCK_LEN)) or values.element_size() != 1:
            raise UnsupportedModelError(
                f"the scales {name!r} of a matrix of {num_rows} x {width} have shape {list(shape)}; one per matrix, "
                f"per row, or per block of {_BLOCK_LEN} x {_BLOCK_LEN} weights is supported"
            )
        if self._files.type_name(stem + _WEIGHT) == "F8_E4M3":
            return Fp8Weight(values, scales.contiguous())
        if scales.shape != (num_rows, 1):
            raise UnsupportedModelError(f"INT8 weights {stem!r} have scales per block; one per row is supported")
        return Int8Weight(values, scales.contiguous())

    def _read_packed(self, stem: str, device: torch.device) -> QuantizedWeight:
        from headrace.kernels.quantized import Int4Weight

        if self._packed_width(stem) != self._files.shape(stem + self._suffix)[1] * _PER_WORD:
            raise UnsupportedModelError(f"the packed weights {stem!r} have more than four bits each")
        values = _unpacked(self._tensor(stem + self._suffix, device), dim=1)
        scales = self._tensor(stem + ".weight_scale", device).float()
        zeros: Tensor | None = None
        if stem + ".weight_zero_point" in self._stored_names:
            zeros = _unpacked(self._tensor(stem + ".weight_zero_point", device), dim=0)[: len(values)].contiguous()
        return self._ordered(Int4Weight(values, scales, zeros), stem + ".weight_g_idx", device)

    def _read_gptq(self, stem: str, device: torch.device) -> QuantizedWeight:
        from headrace.kernels.quantized import Int4Weight

        values = _unpacked(self._tensor(stem + ".qweight", device), dim=0).t().contiguous()
        zeros = _unpacked(self._tensor(stem + ".qzeros", device), dim=1).t() + self._quantization.zero_offset
        scales = self._tensor(stem + ".scales", device).float().t().contiguous()
        return self._ordered(Int4Weight(values, scales, zeros.contiguous()), stem + ".g_idx", device)

    def _read_awq(self, stem: str, device: torch.device) -> QuantizedWeight:
        from headrace.kernels.quantized import Int4Weight

        values = _unpacked(self._tensor(stem + ".qweight", device), dim=1, order=_AWQ_ORDER).t().contiguous()
        zeros = _unpacked(self._tensor(stem + ".qzeros", device), dim=1, order=_AWQ_ORDER).t().contiguous()
        scales = self._tensor(stem + ".scales", device).float().t().contiguous()
        return Int4Weight(values, scales, zeros)

    def _ordered(self, weight: Int4Weight, name: str, device: torch.device) -> Int4Weight:
        """Sorts the columns by their groups, if the groups are not consecutive columns."""
        import torch

        from headrace.kernels.quantized import Int4Weight

        if name not in self._stored_names:
            return weight
        groups = self._tensor(name, device).long()
        if torch.equal(groups, torch.arange(len(groups), device=device) // weight.group_len):
            return weight
        order = groups.argsort(stable=True)
        counts = torch.bincount(groups, minlength=weight.scales.shape[1])
        if not bool((counts == weight.group_len).all()):
            raise UnsupportedModelError(f"the groups of {name!r} differ in length; all of one length are supported")
        return Int4Weight(weight.values[:, order].contiguous(), weight.scales, weight.zeros, order)

    def _tensor(self, name: str, device: torch.device) -> Tensor:
        """Reads a stored tensor as it is."""
        import torch

        if name not in self._stored_names:
            raise ModelError(f"the quantized checkpoint lacks the tensor {name!r}")
        shape = self._files.shape(name)
        out = torch.empty(shape or (1,), dtype=self._files.dtype(name))
        self._files.fill(name, out)
        return out.to(device)

    def _packed_width(self, stem: str) -> int:
        """The number of columns of a packed matrix; its last word may have fewer."""
        import torch

        shape = stem + ".weight_shape"
        if shape not in self._stored_names:
            return self._files.shape(stem + self._suffix)[1] * _PER_WORD
        return int(self._tensor(shape, torch.device("cpu"))[1])

    def _is_quantized(self, name: str) -> bool:
        if name in self._packed:
            return True
        return name.endswith(_WEIGHT) and self._files.type_name(name) in _EIGHT_BITS

    def _is_packed(self, name: str) -> bool:
        return bool(self._suffix) and name.endswith(self._suffix)

    @property
    def _suffix(self) -> str:
        return _PACKED.get(self._quantization.method, "")

    @cached_property
    def _stored_names(self) -> frozenset[str]:
        return frozenset(self._files.names())

    @cached_property
    def _packed(self) -> dict[str, None]:  # an ordered set
        """The unquantized names of matrices that are stored under another one."""
        found = (name for name in self._files.names() if self._is_packed(name))
        return dict.fromkeys(name.removesuffix(self._suffix) + _WEIGHT for name in found)


def part_of(weight: QuantizedWeight, part: Slice | None) -> QuantizedWeight | None:
    """Returns rows and columns of a matrix; None: they cut through groups of weights that share a scale."""
    from headrace.kernels.quantized import Fp8Weight, GroupedWeight, Int4Weight, Int8Weight, of_each_scale

    if part is None:
        return weight
    num_rows, width = weight.values.shape
    columns = range(width) if part.columns is None else part.columns
    rows = slice(part.rows.start, part.rows.stop)
    if isinstance(weight, Int8Weight) or (isinstance(weight, Fp8Weight) and not weight.has_blocks):
        kind = type(weight)
        return kind(part.of(weight.values).contiguous(), weight.scales[rows])
    column_len = _BLOCK_LEN if isinstance(weight, Fp8Weight) else weight.group_len
    row_len = _BLOCK_LEN if isinstance(weight, Fp8Weight) else 1
    if not (_is_aligned(columns, column_len, width) and _is_aligned(part.rows, row_len, num_rows)):
        return None
    of_groups = (
        slice(part.rows.start // row_len, -(-part.rows.stop // row_len)),
        slice(columns.start // column_len, -(-columns.stop // column_len)),
    )
    values = part.of(weight.values).contiguous()
    if isinstance(weight, GroupedWeight):
        return replace(of_each_scale(weight, lambda each: each[of_groups].contiguous()), values=values)
    scales = weight.scales[of_groups].contiguous()
    if isinstance(weight, Fp8Weight):
        return Fp8Weight(values, scales)
    if weight.order is not None and len(columns) < width:
        return None
    zeros = None if weight.zeros is None else weight.zeros[of_groups].contiguous()
    return Int4Weight(values, scales, zeros, weight.order)


def _is_aligned(part: range, length: int, whole: int) -> bool:
    return part.start % length == 0 and (part.stop % length == 0 or part.stop == whole)


def _unpacked(words: Tensor, *, dim: int, order: tuple[int, ...] = tuple(range(_PER_WORD))) -> Tensor:
    """[A, B] int32 -> uint8, eight values for each word along `dim`, value j from bits 4 * order[j]."""
    import torch

    shifts = torch.tensor([4 * place for place in order], dtype=torch.int32, device=words.device)
    if dim == 1:
        return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8).flatten(1)
    return ((words.unsqueeze(1) >> shifts[:, None]) & 15).to(torch.uint8).flatten(0, 1)
