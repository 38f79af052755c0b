"""Weights under our names, from files that hold them in another way."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING

from headrace.models.spec import ModelSpec, Shape
from headrace.models.stored import Place, Stored, places
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
        return [*self._places, *self._unknown]

    def shape(self, name: str) -> Shape:
        place = self._places.get(name)
        return self._files.shape(name) if place is None else place.shape(self._files.shape(place.name))

    def fill(self, name: str, out: Tensor) -> None:
        place = self._places[name]
        self._files.fill_with(place.name, out, place.part_of)

    def stored_rows(self, name: str) -> StoredRows | None:
        return None

    @cached_property
    def _places(self) -> dict[str, Place]:
        found = self._files.names()
        return {name: place for name, place in places(self._stored, self._spec, found).items() if place.name in found}

    @cached_property
    def _unknown(self) -> list[str]:
        """What no tensor of ours is read from, under the name in the file."""
        used = {place.name for place in self._places.values()}
        is_leftover = re.compile(self._stored.leftovers).fullmatch
        return [name for name in self._files.names() if name not in used and not is_leftover(name)]
