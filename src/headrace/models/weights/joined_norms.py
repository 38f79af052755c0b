"""Norms of queries and keys whose files have one tensor per head (StableLM 2 12B): they appear as one of all heads."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from headrace.models.spec import Shape
from headrace.models.weights.file_reader import FileReader
from headrace.models.weights.rearranged import StoredFiles
from headrace.models.weights.safetensors_files import Region
from headrace.models.weights.source import Slice

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headrace.kernels.quantized import QuantizedWeight

_OF_HEAD = re.compile(r"(.*\.self_attn\.[qk]_layernorm)\.norms\.\d+\.weight")


class JoinedNorms:
    def __init__(self, files: StoredFiles) -> None:
        self._files = files

    def names(self) -> Collection[str]:
        return [*(name for name in self._files.names() if not _OF_HEAD.fullmatch(name)), *self._num_heads]

    def shape(self, name: str) -> Shape:
        if name not in self._num_heads:
            return self._files.shape(name)
        return (self._num_heads[name], *self._files.shape(_of_head(name, 0)))

    def fill_regions(self, name: str, out: Tensor, regions: Iterable[Region]) -> None:
        if name not in self._num_heads:
            self._files.fill_regions(name, out, regions)
            return
        for region in regions:
            for row, head in enumerate(region.rows, start=region.first_row):
                self._files.fill_regions(_of_head(name, head), out[row], [Region(region.columns, range(1))])

    def quantized(self, name: str, device: torch.device, part: Slice | None = None) -> QuantizedWeight | None:
        return None if name in self._num_heads else self._files.quantized(name, device, part)

    def read_ahead(self, name: str) -> None:
        self._files.read_ahead(_of_head(name, self._num_heads[name] - 1) if name in self._num_heads else name)

    @property
    def num_bytes_read(self) -> int:
        return self._files.num_bytes_read

    @property
    def file_reader(self) -> FileReader | None:
        return self._files.file_reader

    @cached_property
    def _num_heads(self) -> dict[str, int]:
        """Heads of each joined tensor, by its name."""
        counts: dict[str, int] = {}
        for match in map(_OF_HEAD.fullmatch, self._files.names()):
            if match is not None:
                name = f"{match[1]}.weight"
                counts[name] = counts.get(name, 0) + 1
        return counts


def _of_head(name: str, head: int) -> str:
    return f"{name.removesuffix('.weight')}.norms.{head}.weight"
