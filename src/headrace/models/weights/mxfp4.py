"""Weights of experts in MXFP4, as gpt-oss stores them: dequantized when they are read.

A group of 32 weights of a row has 16 bytes in `*_blocks` (two weights each, the lower half first) and one power of two
in `*_scales`. Blocks are [E, N, K / 32, 16], scales [E, N, K / 32]; as unquantized tensors they would be [E, K, N].
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from headrace.errors import ModelError
from headrace.models.spec import Shape
from headrace.models.weights.file_reader import FileReader
from headrace.models.weights.safetensors_files import Region, SafetensorsFiles
from headrace.models.weights.source import Slice

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headrace.kernels.quantized import QuantizedWeight

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP_LEN, _GROUP_BYTES = 32, 16
_EXPONENT_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Mxfp4Files:
    """Files whose quantized stacks appear as unquantized ones."""

    def __init__(self, files: SafetensorsFiles) -> None:
        self._files = files

    def names(self) -> Collection[str]:
        parts = {stem + suffix for stem in self._quantized for suffix in (_BLOCKS, _SCALES)}
        return [*(name for name in self._files.names() if name not in parts), *self._quantized]

    def shape(self, name: str) -> Shape:
        if name not in self._quantized:
            return self._files.shape(name)
        blocks, scales = self._files.shape(name + _BLOCKS), self._files.shape(name + _SCALES)
        if len(blocks) != 4 or blocks[-1] != _GROUP_BYTES or scales != blocks[:-1]:
            raise ModelError(
                f"tensor {name!r} in MXFP4 has blocks of shape {list(blocks)} and scales of shape {list(scales)}; they "
                f"must be [experts, rows, groups, {_GROUP_BYTES}] and [experts, rows, groups]"
            )
        num_experts, num_rows, num_groups, _ = blocks
        return (num_experts, num_groups * _GROUP_LEN, num_rows)

    def fill_regions(self, name: str, out: Tensor, regions: Iterable[Region]) -> None:
        if name not in self._quantized:
            self._files.fill_regions(name, out, regions)
            return
        for region in regions:
            assert region.is_transposed
            weights = self._dequantized(name, region, out)
            out[region.first_row : region.first_row + len(weights)].copy_(weights)

    def quantized(self, name: str, device: torch.device, part: Slice | None = None) -> QuantizedWeight | None:
        return None

    def read_ahead(self, name: str) -> None:
        self._files.read_ahead(name + _BLOCKS if name in self._quantized else name)

    @property
    def num_bytes_read(self) -> int:
        return self._files.num_bytes_read

    @property
    def file_reader(self) -> FileReader:
        return self._files.file_reader

    def _dequantized(self, name: str, region: Region, out: Tensor) -> Tensor:  # [rows, columns]
        """Returns some rows of one expert's matrix, and some columns of them."""
        import torch

        _, num_columns, num_rows = self.shape(name)
        num_groups = num_columns // _GROUP_LEN
        expert, first_column = divmod(region.rows.start, num_columns)
        first = expert * num_rows + region.columns.start
        rows = range(first, first + len(region.columns))
        blocks = torch.empty(len(rows) * num_groups, _GROUP_BYTES, dtype=torch.uint8)
        scales = torch.empty(len(rows), num_groups, dtype=torch.uint8)
        groups = range(rows.start * num_groups, rows.stop * num_groups)
        self._files.fill_regions(name + _BLOCKS, blocks, [Region(groups, range(_GROUP_BYTES))])
        self._files.fill_regions(name + _SCALES, scales, [Region(rows, range(num_groups))])
        whole = dequantize(blocks.to(out.device).view(len(rows), num_groups, -1), scales.to(out.device))
        return whole[:, first_column : first_column + len(region.rows)]

    @cached_property
    def _quantized(self) -> dict[str, None]:  # an ordered set
        names = self._files.names()
        found = (name.removesuffix(_BLOCKS) for name in names if name.endswith(_BLOCKS))
        return dict.fromkeys(stem for stem in found if stem + _SCALES in names)


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """[N, G, 16] and [N, G] -> [N, 32 * G] float32."""
    import torch

    values = torch.tensor((*_MAGNITUDES, *(-each for each in _MAGNITUDES)), device=blocks.device)
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(2)  # [N, G, 32]
    weights = torch.ldexp(values[halves.int()], (scales.int() - _EXPONENT_BIAS).unsqueeze(-1))
    return weights.flatten(1)
