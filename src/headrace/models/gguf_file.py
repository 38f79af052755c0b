"""The header of a GGUF file (versions 2 and 3), read in a few hundredths of a second; tensors stay on disk.

The reader of the `gguf` package makes several array objects for each token of the vocabulary, which takes seconds.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import ModelError, UnsupportedModelError

_STRING, _ARRAY = 8, 9
_SCALARS = {  # GGUF value type -> struct and numpy code
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor is in its file, and how it is stored."""

    name: str
    shape: tuple[int, ...]  # in torch's order (GGUF lists the dimensions backwards)
    type_id: int  # a gguf.GGMLQuantizationType
    offset: int  # from the start of the file
    num_bytes: int

    @property
    def num_rows(self) -> int:
        """Number of rows, of all matrices in a stack. The elements of a vector count as rows."""
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else math.prod(self.shape)

    @property
    def type_name(self) -> str:
        from gguf.constants import GGMLQuantizationType

        return GGMLQuantizationType(self.type_id).name


@dataclass(frozen=True)
class GgufFile:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]  # under their GGUF names


def read_gguf(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, data)
    except (struct.error, IndexError, ValueError) as error:  # an empty file cannot be mapped: ValueError
        raise ModelError(f"{path} is truncated or damaged ({error}); fetch it again") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error


def _read(path: Path, data: mmap.mmap) -> GgufFile:
    if data[:4] != b"GGUF":
        raise UnsupportedModelError(f"{path} is not a GGUF file (it begins with {data[:4]!r})")
    cursor = _Cursor(data, offset=4)
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise UnsupportedModelError(
            f"{path} has GGUF version {version}; versions 2 and 3, little-endian, are supported"
        )
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    if metadata.get("split.count", 0) > 1:
        raise UnsupportedModelError(
            f"{path} is one of {metadata['split.count']} parts; join them with `llama-gguf-split --merge` first"
        )
    entries = [_TensorEntry.read(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.offset // alignment) * alignment
    tensors = {entry.name: entry.located(start, path) for entry in entries}
    _check_complete(path, tensors, file_len=len(data))
    return GgufFile(path=path, metadata=metadata, tensors=tensors)


def _check_complete(path: Path, tensors: Mapping[str, GgufTensor], *, file_len: int) -> None:
    end = max((tensor.offset + tensor.num_bytes for tensor in tensors.values()), default=0)
    if end > file_len:
        raise ModelError(f"{path} is truncated: {file_len} bytes, its tensors end at {end}; fetch it again")


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int  # from the start of the tensor data

    @classmethod
    def read(cls, cursor: _Cursor) -> _TensorEntry:
        name = cursor.string()
        dims = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
        return cls(name=name, shape=tuple(reversed(dims)), type_id=cursor.scalar("I"), offset=cursor.scalar("Q"))

    def located(self, start: int, path: Path) -> GgufTensor:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            block_len, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(self.type_id)]
        except (ValueError, KeyError):
            raise UnsupportedModelError(
                f"{path}: tensor {self.name!r} has the unknown storage type {self.type_id}"
            ) from None
        num_elements = int(np.prod(self.shape, dtype=np.int64))
        if self.shape and self.shape[-1] % block_len:
            raise ModelError(f"{path}: tensor {self.name!r} has rows of {self.shape[-1]}, no multiple of {block_len}")
        return GgufTensor(
            self.name, self.shape, self.type_id, start + self.offset, num_elements // block_len * block_bytes
        )


class _Cursor:
    """Reads forward through the header."""

    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self._data = data
        self.offset = offset

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self.offset)
        self.offset += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        (length,) = _LENGTH.unpack_from(self._data, self.offset)
        start = self.offset + _LENGTH.size
        self.offset = start + length
        self._require(self.offset)
        return str(self._data[start : self.offset], "utf-8", "replace")

    def value(self, type_id: int) -> Any:
        if type_id in _SCALARS:
            return self.scalar(_SCALARS[type_id])
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            return self._array(self.scalar("I"), self.scalar("Q"))
        raise ValueError(f"unknown metadata type {type_id}")

    def _array(self, type_id: int, length: int) -> list[Any]:
        if type_id not in _SCALARS:
            return [self.value(type_id) for _ in range(length)]
        dtype = np.dtype(_SCALARS[type_id]).newbyteorder("<")
        start = self.offset
        self.offset += length * dtype.itemsize
        self._require(self.offset)
        items: list[Any] = np.frombuffer(self._data[start : self.offset], dtype=dtype).tolist()
        return items

    def _require(self, end: int) -> None:
        if end > len(self._data):
            raise ValueError(f"metadata ends at byte {end} of {len(self._data)}")
