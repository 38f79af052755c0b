"""Weights of a head that sentence-transformers keeps in folders of their own, beside those of the model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.models.spec import Shape
from headrace.models.weights.file_reader import FileReader
from headrace.models.weights.safetensors_files import SafetensorsFiles
from headrace.models.weights.source import Slice, StoredRows, WeightSource

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headrace.kernels.quantized import QuantizedWeight

_OURS = re.compile(r"head\.(\d+)\.(weight|bias)")
_THEIRS = "linear."


@dataclass(frozen=True)
class WithHeadFiles:
    """A source, and the files of some layers of the head by their index."""

    source: WeightSource
    files: Mapping[int, SafetensorsFiles]

    def names(self) -> Collection[str]:
        own = [
            f"head.{index}.{name.removeprefix(_THEIRS)}"
            for index, files in self.files.items()
            for name in files.names()
        ]
        return [*self.source.names(), *own]

    def shape(self, name: str) -> Shape:
        files, theirs = self._find(name)
        return files.shape(theirs)

    def fill(self, name: str, out: Tensor, part: Slice | None = None) -> None:
        files, theirs = self._find(name)
        files.fill(theirs, out, part)

    def stored_rows(self, name: str, part: Slice | None = None) -> StoredRows | None:
        return None

    def quantized(self, name: str, device: torch.device, part: Slice | None = None) -> QuantizedWeight | None:
        return self.source.quantized(name, device, part)

    @property
    def file_reader(self) -> FileReader | None:
        """That of the model's own files: the head is small."""
        return self.source.file_reader

    @property
    def num_bytes_read(self) -> int:
        return self.source.num_bytes_read + sum(files.num_bytes_read for files in self.files.values())

    def _find(self, name: str) -> tuple[WeightSource, str]:
        match = _OURS.fullmatch(name)
        if match is None or int(match[1]) not in self.files:
            return self.source, name
        return self.files[int(match[1])], _THEIRS + match[2]
