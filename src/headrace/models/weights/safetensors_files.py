"""Weights from the safetensors files of a directory: each tensor, or a part of it, is read straight to its place, or
through a small buffer if its type changes (`file_reader.py`)."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ModelError, UnsupportedModelError
from headrace.models.spec import Shape
from headrace.models.weights.file_reader import FileReader, OpenFile, Piece, pieces_of
from headrace.models.weights.source import Slice, StoredRows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headrace.kernels.quantized import QuantizedWeight

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LENGTH_BYTES = 8  # of the header, in front of it
_ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "U8": 1, "I8": 1, "I32": 4, "I64": 8, "F8_E4M3": 1}
_RAW = ("U8", "I8", "I32", "I64", "F8_E4M3")  # parts of quantized weights: read only as what they are
_TORCH_NAMES = {
    "BF16": "torch.bfloat16",
    "F16": "torch.float16",
    "F32": "torch.float32",
    "F64": "torch.float64",
    "F8_E4M3": "torch.float8_e4m3fn",
    "F8_E5M2": "torch.float8_e5m2",
    "I8": "torch.int8",
    "U8": "torch.uint8",
    "I16": "torch.int16",
    "I32": "torch.int32",
    "I64": "torch.int64",
    "BOOL": "torch.bool",
}


@dataclass(frozen=True, slots=True)
class Region:
    """Rows and columns of a stored matrix, and the first row of the tensor that they fill. The leading dimensions of a
    stored stack of matrices count as rows; a vector is a matrix of one column."""

    rows: range
    columns: range
    first_row: int = 0
    is_transposed: bool = False  # columns become rows of the tensor


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One entry of a file's header."""

    file: OpenFile
    type_name: str
    shape: Shape
    offset: int  # in the file

    @property
    def row_len(self) -> int:
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else math.prod(self.shape)

    def pieces(self, region: Region, itemsize: int) -> list[Piece]:
        stride = itemsize * self.row_len
        return pieces_of(
            self.offset + region.rows.start * stride + region.columns.start * itemsize,
            row_bytes=itemsize * len(region.columns),
            stride=stride,
            num_rows=len(region.rows),
        )


class SafetensorsFiles:
    """Reads tensors, and parts of them, from all files of a directory. Files are opened when first needed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tensors: dict[str, StoredTensor] = {}  # of every file opened so far
        self._reader = FileReader()

    @property
    def file_reader(self) -> FileReader:
        return self._reader

    @property
    def num_bytes_read(self) -> int:
        """Bytes of tensors, without those of headers."""
        return self._reader.num_bytes_read

    def names(self) -> Collection[str]:
        return self._files.keys()

    def shape(self, name: str) -> Shape:
        return self._stored(name).shape

    def type_name(self, name: str) -> str:
        return self._stored(name).type_name

    def dtype(self, name: str) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, _TORCH_NAMES[self.type_name(name)].removeprefix("torch."))
        return dtype

    def fill(self, name: str, out: Tensor, part: Slice | None = None) -> None:
        tensor = self._stored(name)
        rows, columns = range(tensor.num_rows), range(tensor.row_len)
        if part is not None:
            rows, columns = part.rows, columns if part.columns is None else part.columns
        self.fill_regions(name, out, [Region(rows, columns)])
        if part is None:
            self.read_ahead(name)

    def read_ahead(self, name: str) -> None:
        """Has the system read what follows a tensor: it is probably needed next. What was announced is read anyway."""
        if self._reader.reads_ahead:
            return
        tensor = self._stored(name)
        tensor.file.read_ahead(tensor.offset + math.prod(tensor.shape) * _ITEM_BYTES[tensor.type_name])

    def fill_regions(self, name: str, out: Tensor, regions: Iterable[Region]) -> None:
        """Writes regions of the stored tensor into `out`, one below the other. Parts of quantized weights are read only
        as what they are."""
        tensor = self._stored(name)
        if tensor.type_name not in _ITEM_BYTES or (tensor.type_name in _RAW and out.dtype != self.dtype(name)):
            raise UnsupportedModelError(
                f"tensor {name!r} is stored as {_TORCH_NAMES.get(tensor.type_name, tensor.type_name)}, and config.json "
                "does not say how it is quantized; fetch its quantization_config, or use another checkpoint"
            )
        dtype = self.dtype(name)
        for region in regions:
            self._fill_region(tensor, dtype, out.view(len(out), -1), region)

    def _fill_region(self, tensor: StoredTensor, dtype: torch.dtype, out: Tensor, region: Region) -> None:
        pieces = tensor.pieces(region, dtype.itemsize)
        num_rows = len(region.columns if region.is_transposed else region.rows)
        out = out[region.first_row : region.first_row + num_rows]
        is_plain = out.dtype == dtype and self._reader.target(out).type == "cpu" and not region.is_transposed
        if is_plain and out.is_contiguous():
            self._reader.fill(tensor.file, pieces, out)
            return
        for piece, rows in self._reader.staged(tensor.file, pieces, dtype, out.device):
            here = slice(piece.first_row, piece.first_row + piece.num_rows)
            if region.is_transposed:
                out[:, here].copy_(rows.to(out.device, non_blocking=True).t())  # a GPU transposes faster than a CPU
            else:
                _copy(rows, out[here])

    def stored_rows(self, name: str, part: Slice | None = None) -> StoredRows | None:
        return None

    def quantized(self, name: str, device: torch.device, part: Slice | None = None) -> QuantizedWeight | None:
        return None

    def _stored(self, name: str) -> StoredTensor:
        if name not in self._tensors and name not in self._opened(self._files[name]):
            raise ModelError(f"{self._files[name]} lacks the tensor {name!r}, which {_INDEX} names; fetch it again")
        return self._tensors[name]

    def _opened(self, path: Path) -> dict[str, StoredTensor]:
        tensors = _read_header(path)
        self._tensors |= tensors
        return tensors

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Maps each tensor to its file."""
        index = self._directory / _INDEX
        if not index.exists():
            return {name: path for path in safetensors_paths(self._directory) for name in self._opened(path)}
        files = {name: self._directory / file for name, file in read_json(index)["weight_map"].items()}
        for path in sorted(set(files.values())):
            if not path.exists():
                raise ModelError(f"{index} names {path.name}, which does not exist; fetch the model again")
        return files


def _copy(rows: Tensor, out: Tensor) -> None:
    """Copies and converts. A GPU converts itself, and the copy to it is not waited for."""
    if out.dtype != rows.dtype:
        rows = rows.to(out.device, non_blocking=True)
    out.copy_(rows, non_blocking=True)


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Checks a file (the library compares header and length) and returns its tensors by name."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            pass
        with path.open("rb") as opened:
            header_len = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            header = json.loads(opened.read(header_len))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read as safetensors ({error}); fetch it again") from error
    file, start = OpenFile(path), _LENGTH_BYTES + header_len
    return {
        name: StoredTensor(file, entry["dtype"], tuple(entry["shape"]), start + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def safetensors_paths(directory: Path) -> list[Path]:
    """Returns the files of the model. `consolidated` files repeat it in the original authors' layout."""
    if (directory / _SINGLE).exists():
        return [directory / _SINGLE]
    return sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith("consolidated"))


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, found {type(content).__name__}")
    return content
