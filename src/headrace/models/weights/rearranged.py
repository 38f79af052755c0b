"""Weights under our names, from safetensors that store them differently (`stored_tensors.py`)."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING

from headrace.models.spec import ModelSpec, Shape
from headrace.models.stored_tensors import Stored, StoredPart, find_parts
from headrace.models.weights.safetensors_files import SafetensorsFiles
from headrace.models.weights.source import StoredRows

if TYPE_CHECKING:
    from torch import Tensor


class Rearranged:
    def __init__(self, files: SafetensorsFiles, stored: Stored, spec: ModelSpec) -> None:
        self._files = files
        self._stored = stored
        self._spec = spec

    def names(self) -> Collection[str]:
        return [*self._parts, *self._unknown]

    def shape(self, name: str) -> Shape:
        part = self._parts.get(name)
        return self._files.shape(name) if part is None else part.shape(self._files.shape(part.name))

    def fill(self, name: str, out: Tensor) -> None:
        part = self._parts[name]
        self._files.fill_with(part.name, out, part.take_from)

    def stored_rows(self, name: str) -> StoredRows | None:
        return None

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
