"""Weights under our names, from safetensors that store them differently (`stored_tensors.py`)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from headrace.models.spec import ModelSpec, Shape
from headrace.models.stored_tensors import Stored, StoredPart, find_parts
from headrace.models.weights.file_reader import FileReader
from headrace.models.weights.safetensors_files import Region
from headrace.models.weights.source import Slice, StoredRows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headrace.kernels.quantized import QuantizedWeight


class StoredFiles(Protocol):
    """Tensors under the names and in the shapes of their files."""

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> Shape: ...

    def fill_regions(self, name: str, out: Tensor, regions: Iterable[Region]) -> None: ...

    def quantized(self, name: str, device: torch.device, part: Slice | None = None) -> QuantizedWeight | None: ...

    def read_ahead(self, name: str) -> None: ...

    @property
    def num_bytes_read(self) -> int: ...

    @property
    def file_reader(self) -> FileReader | None: ...


class Rearranged:
    def __init__(self, files: StoredFiles, stored: Stored, spec: ModelSpec) -> None:
        self._files = files
        self._stored = stored
        self._spec = spec

    def names(self) -> Collection[str]:
        return [*self._parts, *self._unknown]

    def shape(self, name: str) -> Shape:
        part = self._parts.get(name)
        return self._files.shape(name) if part is None else part.shape(self._files.shape(part.name))

    def fill(self, name: str, out: Tensor, part: Slice | None = None) -> None:
        stored = self._parts[name]
        num_rows, *_ = self.shape(name)
        rows = range(num_rows) if part is None else part.rows
        columns = None if part is None else part.columns
        self._files.fill_regions(stored.name, out, regions_of(stored, rows, columns, self._files.shape(stored.name)))
        if part is None:
            self._files.read_ahead(stored.name)

    def stored_rows(self, name: str, part: Slice | None = None) -> StoredRows | None:
        return None

    def quantized(self, name: str, device: torch.device, part: Slice | None = None) -> QuantizedWeight | None:
        """A matrix of its own, or consecutive rows of a fused one; others are dequantized."""
        stored = self._parts[name]
        whole = self._files.shape(stored.name)
        if stored.member is not None or stored.num_groups > 1 or len(whole) != 2 or stored.transposes(whole):
            return None
        num_rows, *_ = self.shape(name)
        rows = range(num_rows) if part is None else part.rows
        first = stored.first_row
        moved = Slice(range(first + rows.start, first + rows.stop), None if part is None else part.columns)
        return self._files.quantized(stored.name, device, moved)

    @property
    def num_bytes_read(self) -> int:
        return self._files.num_bytes_read

    @property
    def file_reader(self) -> FileReader | None:
        return self._files.file_reader

    def stored_names(self) -> dict[str, str] | None:
        """The name of each of our tensors in the files; None: some are parts of other tensors."""
        parts = self._parts
        return {name: part.name for name, part in parts.items()} if all(p.is_whole for p in parts.values()) else None

    @cached_property
    def _parts(self) -> dict[str, StoredPart]:
        found = self._files.names()
        return {name: part for name, part in find_parts(self._stored, self._spec, found).items() if part.name in found}

    @cached_property
    def _unknown(self) -> list[str]:
        """Stored tensors from which none of ours is read, under their names in the file."""
        used = {part.name for part in self._parts.values()}
        is_leftover = re.compile(self._stored.leftovers).fullmatch
        return [
            name
            for name in self._files.names()
            if name not in used and not is_leftover(name) and not self._is_of_extra_layer(name)
        ]

    def _is_of_extra_layer(self, name: str) -> bool:
        match = re.match(r"[\w.]*layers\.(\d+)\.", name)
        return self._stored.has_extra_layers and match is not None and int(match[1]) >= self._spec.num_layers


def regions_of(part: StoredPart, rows: range, columns: range | None, stored: Shape) -> list[Region]:
    """Where rows and columns of our tensor are in the stored one, whose shape is `stored`."""
    if len(stored) == 1:
        return [Region(run, range(1), first) for first, run in _runs(part, rows, 0)]
    if part.is_vector:
        row = part.member or 0
        return [Region(range(row, row + 1), run, first, is_transposed=True) for first, run in _runs(part, rows, 0)]
    height, width = stored[-2:]
    first_row = (part.member or 0) * height  # of the member in a stack
    if not part.transposes((height, width)):
        columns = range(width) if columns is None else columns
        return [Region(run, columns, first) for first, run in _runs(part, rows, first_row)]
    columns = range(height) if columns is None else columns
    stored_rows = range(first_row + columns.start, first_row + columns.stop)
    return [Region(stored_rows, run, first, is_transposed=True) for first, run in _runs(part, rows, 0)]


def _runs(part: StoredPart, rows: range, offset: int) -> list[tuple[int, range]]:
    """Our rows as contiguous ranges of stored ones: those of a fused tensor may be interleaved by head. Each range with
    the number of its first row, counted from `rows.start`."""
    runs = []
    at = rows.start
    while at < rows.stop:
        group, within = divmod(at, part.num_rows)
        count = min(part.num_rows - within, rows.stop - at)
        start = offset + group * part.rows_per_group + part.first_row + within
        runs.append((at - rows.start, range(start, start + count)))
        at += count
    return runs
