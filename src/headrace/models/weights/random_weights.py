"""Random weights of the right shapes, to measure a model's cost from its config.json alone."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from headrace.models.spec import ModelSpec
from headrace.models.weights.no_files import WeightsWithoutFiles
from headrace.models.weights.source import Slice

_STANDARD_DEVIATION = 0.02
_POOL_LEN = 4_194_301  # a prime, so that rows of any length start at different offsets in the pool


class RandomWeights(WeightsWithoutFiles):
    """Normally distributed numbers; norm weights are one. A tensor depends on the seed and its name, not on the loading
    order.

    A GPU generates them. A CPU would need a minute for a few billion, so it copies them from one pool.
    """

    def __init__(self, spec: ModelSpec, *, seed: int) -> None:
        super().__init__(spec)
        self._seed = seed
        self._norm_weight = 1.0 - spec.norm_offset
        self._pool: Tensor | None = None  # filled when first needed

    def fill(self, name: str, out: Tensor, part: Slice | None = None) -> None:
        """A part has the numbers that it has in the whole tensor."""
        if name.endswith("norm.weight"):
            out.fill_(1.0 if name.endswith("recurrent.norm.weight") else self._norm_weight)  # that one has no offset
        elif out.device.type == "cpu":
            self._fill_part_from_pool(name, out, part)
        else:
            generator = torch.Generator(device=out.device).manual_seed(self._seed + zlib.crc32(name.encode()))
            whole = out if part is None else torch.empty(self._shapes[name], dtype=out.dtype, device=out.device)
            whole.normal_(0.0, _STANDARD_DEVIATION, generator=generator)
            if part is not None:
                out.copy_(part.of(whole))

    def _fill_part_from_pool(self, name: str, out: Tensor, part: Slice | None) -> None:
        start, width = zlib.crc32(name.encode()), math.prod(self._shapes[name][1:])
        first_row = 0 if part is None else part.rows.start
        if part is None or part.columns is None:
            self._fill_from_pool((start + first_row * width) % _POOL_LEN, out.view(-1))
            return
        at_once = max(1, _POOL_LEN // width)
        for row in range(0, len(out), at_once):
            rows = torch.empty(len(out[row : row + at_once]), width)
            self._fill_from_pool((start + (first_row + row) * width) % _POOL_LEN, rows.view(-1))
            out[row : row + at_once] = rows[:, part.columns.start : part.columns.stop]

    def _fill_from_pool(self, start: int, out: Tensor) -> None:
        if self._pool is None:
            generator = torch.Generator().manual_seed(self._seed)
            self._pool = torch.empty(_POOL_LEN).normal_(0.0, _STANDARD_DEVIATION, generator=generator)
        written = 0
        while written < len(out):
            piece = self._pool[start : start + len(out) - written]
            out[written : written + len(piece)].copy_(piece)
            written, start = written + len(piece), 0
