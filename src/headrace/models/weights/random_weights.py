"""Random weights of the right shapes, to measure a model's cost from its config.json alone."""

from __future__ import annotations

import zlib
from collections.abc import Collection

import torch
from torch import Tensor

from headrace.models.spec import ModelSpec, Shape
from headrace.models.weights.source import Slice, StoredRows, fill_from_whole

_STANDARD_DEVIATION = 0.02
_POOL_LEN = 4_194_301  # a prime, so that rows of any length start at different offsets in the pool


class RandomWeights:
    """Normally distributed numbers; norm weights are one. A tensor depends on the seed and its name, not on the loading
    order.

    A GPU generates them. A CPU would need a minute for a few billion, so it copies them from one pool.
    """

    def __init__(self, spec: ModelSpec, *, seed: int) -> None:
        self._shapes = spec.tensor_shapes()
        self._seed = seed
        self._norm_weight = 1.0 - spec.norm_offset
        self._pool: Tensor | None = None  # filled when first needed

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> Shape:
        return self._shapes[name]

    def fill(self, name: str, out: Tensor, part: Slice | None = None) -> None:
        if part is not None:
            fill_from_whole(self, name, out, part)
        elif name.endswith("norm.weight"):
            out.fill_(self._norm_weight)
        elif out.device.type == "cpu":
            self._fill_from_pool(zlib.crc32(name.encode()) % _POOL_LEN, out.view(-1))
        else:
            generator = torch.Generator(device=out.device).manual_seed(self._seed + zlib.crc32(name.encode()))
            out.normal_(0.0, _STANDARD_DEVIATION, generator=generator)

    def stored_rows(self, name: str) -> StoredRows | None:
        return None

    def _fill_from_pool(self, start: int, out: Tensor) -> None:
        if self._pool is None:
            generator = torch.Generator().manual_seed(self._seed)
            self._pool = torch.empty(_POOL_LEN).normal_(0.0, _STANDARD_DEVIATION, generator=generator)
        written = 0
        while written < len(out):
            piece = self._pool[start : start + len(out) - written]
            out[written : written + len(piece)].copy_(piece)
            written, start = written + len(piece), 0
