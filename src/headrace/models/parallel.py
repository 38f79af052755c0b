"""The parts of a decoder that need the other ranks. Each has the interface of the part that it replaces.

x ─▶ qkv, gate and up ─▶ attention or activation, of this rank's heads or width ─▶ o, down ─▶ sum over the ranks
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.dist.collectives import StageLink, TensorGroup
from headrace.dist.mesh import Span
from headrace.kernels import ops
from headrace.kernels.layout import Rows
from headrace.models.embeddings import Embeddings


@dataclass(frozen=True, slots=True)
class RowParallelLinear:
    """A linear layer whose input is divided over the ranks: the outputs are added up. One rank has the bias."""

    linear: ops.PackedLinear  # [N, this rank's part of K]
    group: TensorGroup

    def prefers_fp8(self, num_rows: int) -> bool:
        return self.linear.prefers_fp8(num_rows)

    def __call__(self, x: Rows) -> Tensor:
        return self.group.all_reduce(self.linear(x))


@dataclass(frozen=True, slots=True)
class VocabularyParallelHead:
    """The head, with the rows of this rank's tokens. Every rank gets the logits of all tokens, bitwise the same."""

    linear: ops.PackedLinear
    group: TensorGroup
    vocabulary_sizes: tuple[int, ...]  # of all ranks

    def prefers_fp8(self, num_rows: int) -> bool:
        return self.linear.prefers_fp8(num_rows)

    def __call__(self, x: Rows) -> Tensor:  # [S, H] -> [S, V]
        return self.group.gather_columns(self.linear(x), self.vocabulary_sizes)


@dataclass(frozen=True, slots=True)
class VocabularyParallelEmbeddings:
    """The embeddings of this rank's tokens, and zeros for other tokens, so that the sum over the ranks is exact."""

    embeddings: Embeddings
    vocabulary: Span
    group: TensorGroup

    def __call__(self, token_ids: Tensor) -> Tensor:  # [T] -> [T, H]
        local = token_ids - self.vocabulary.start
        is_ours = (local >= 0) & (local < self.vocabulary.size)
        found = self.embeddings(local.where(is_ours, torch.zeros_like(local)))
        return self.group.all_reduce(found.masked_fill_(~is_ours[:, None], 0.0))

    @property
    def num_bytes(self) -> int:
        return self.embeddings.num_bytes


@dataclass(frozen=True, slots=True)
class ReceivedHidden:
    """In place of the embeddings: the residual stream as the stage before has left it."""

    stages: StageLink
    hidden_size: int
    dtype: torch.dtype

    def __call__(self, token_ids: Tensor) -> Tensor:  # [T] -> [T, H]
        out = torch.empty(len(token_ids), self.hidden_size, dtype=self.dtype, device=token_ids.device)
        return self.stages.receive(out)

    @property
    def num_bytes(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class ParallelWideNorms:
    """RMS norms over all query heads and over all key heads of a token, which are on several ranks."""

    q_weight: Tensor  # [this rank's queries] float32
    k_weight: Tensor  # [this rank's keys] float32
    eps: float
    num_queries: int  # elements on all ranks
    num_keys: int
    num_kv_copies: int  # ranks with the same keys: each adds its part of their squares
    group: TensorGroup

    def __call__(self, qkv: Tensor) -> None:  # [T, queries + keys + values]
        queries, keys, _ = qkv.split([len(self.q_weight), len(self.k_weight), len(self.k_weight)], dim=1)
        wide_queries, wide_keys = queries.float(), keys.float()
        squares = torch.stack(
            [wide_queries.square().sum(1), wide_keys.square().sum(1) / self.num_kv_copies], dim=1
        )  # [T, 2]
        sums = self.group.all_reduce(squares.contiguous())
        queries.copy_(wide_queries * (sums[:, :1] / self.num_queries + self.eps).rsqrt() * self.q_weight)
        keys.copy_(wide_keys * (sums[:, 1:] / self.num_keys + self.eps).rsqrt() * self.k_weight)

    def key_gains(self, num_kv_heads: int) -> Tensor:  # [Hkv, D]
        return self.k_weight.view(num_kv_heads, -1)
