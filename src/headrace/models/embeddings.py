"""Token ids to the vectors that the first layer reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import ops
from headrace.models.layers import Norm
from headrace.models.weights.dequantize import dequantize
from headrace.models.weights.source import StoredRows


class Embeddings(Protocol):
    def __call__(self, token_ids: Tensor) -> Tensor: ...  # [T] -> [T, H]

    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class DenseEmbeddings:
    table: Tensor  # [V, H]

    def __call__(self, token_ids: Tensor) -> Tensor:
        return ops.embed(token_ids, self.table)

    @property
    def num_bytes(self) -> int:
        return self.table.nbytes


@dataclass(frozen=True, slots=True)
class ScaledEmbeddings:
    """Other embeddings, multiplied by a number."""

    embeddings: Embeddings
    scale: float

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.embeddings(token_ids).mul_(self.scale)

    @property
    def num_bytes(self) -> int:
        return self.embeddings.num_bytes


@dataclass(frozen=True, slots=True)
class NormedEmbeddings:
    """Other embeddings, normed."""

    embeddings: Embeddings
    norm: Norm

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.norm.plain(self.embeddings(token_ids))

    @property
    def num_bytes(self) -> int:
        return self.embeddings.num_bytes


@dataclass(frozen=True, slots=True)
class QuantizedEmbeddings:
    """The table as stored in its file; a step dequantizes the rows that it needs. Exact, with a sixth of the memory."""

    rows: StoredRows
    hidden_size: int

    def __call__(self, token_ids: Tensor) -> Tensor:
        out = np.empty((len(token_ids), self.hidden_size), np.float32)
        dequantize(self.rows.raw[token_ids.numpy()], self.rows.type_name, out)
        return torch.from_numpy(out)

    @property
    def num_bytes(self) -> int:
        return self.rows.raw.nbytes
