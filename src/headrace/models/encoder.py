"""The encoder, for BERT and its relatives: whole texts in, one hidden state per token out. No cache, no decoding.

The texts of a step are packed one after the other without padding (`PackedLayout`). Where norms come after the sum,
the residual stream is the normed sum itself; where they come before, as in the decoder, it is the plain sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.layout import PackedLayout
from headrace.models.encoder_spec import EncoderSpec
from headrace.models.head import PoolerHead
from headrace.models.layers import Mlp, Norm


@dataclass(frozen=True, slots=True)
class EncoderAttention:
    """Self-attention within each text, with H heads of size D."""

    qkv: ops.PackedLinear  # [3 * H * D, hidden]
    output: ops.PackedLinear  # [hidden, H * D]
    cos_sin: Tensor | None  # [max_len, D] float32; None: heads do not rotate
    num_heads: int
    scale: float
    reach: int | None  # how many tokens it sees to each side; None: all

    def __call__(self, x: Tensor, layout: PackedLayout) -> Tensor:  # [T, hidden]
        qkv = self.qkv(x)
        if self.cos_sin is not None:
            ops.rotate(qkv, layout.positions, self.cos_sin, self.num_heads)
        return self.output(ops.bidirectional_attention(qkv, layout, self.num_heads, self.scale, self.reach))


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    attention: EncoderAttention
    attention_norm: Norm | None  # None: it reads what is normed already
    mlp: Mlp
    mlp_norm: Norm


@dataclass(frozen=True, slots=True)
class Encoder:
    spec: EncoderSpec
    dtype: torch.dtype
    device: torch.device
    table: Tensor  # [V, hidden]
    positions: Tensor | None  # [P, hidden], learned
    types: Tensor | None  # [types, hidden]
    embedding_norm: Norm
    layers: tuple[EncoderLayer, ...]
    norm: Norm | None  # None: the last layer has normed
    pooler_head: PoolerHead | None
    max_len: int
    num_bytes: int  # of the weights
    num_bytes_read: int = 0  # from files, to load them

    def hidden(self, token_ids: Tensor, layout: PackedLayout) -> Tensor:
        """[T] -> [T, hidden]: returns the hidden state of every token, before the final norm."""
        x = self._embedded(token_ids, layout)
        for layer in self.layers:
            x = self._normed_after(layer, x, layout) if self.spec.norms_after else _normed_before(layer, x, layout)
        return x

    def normed(self, hidden: Tensor) -> Tensor:
        """[S, hidden]: applies the final norm, if there is one."""
        return hidden if self.norm is None else self.norm.plain(hidden)

    def _embedded(self, token_ids: Tensor, layout: PackedLayout) -> Tensor:
        x = ops.embed(token_ids, self.table)
        if self.positions is not None:
            x.add_(self.positions.index_select(0, layout.positions))
        if self.types is not None:  # a tokenizer may tell two texts apart where the model does not
            x.add_(self.types.index_select(0, layout.types) if self.spec.num_types > 1 else self.types)
        return self.embedding_norm.plain(x)

    def _normed_after(self, layer: EncoderLayer, x: Tensor, layout: PackedLayout) -> Tensor:
        assert layer.attention_norm is not None
        x = _sum_normed(layer.attention_norm, layer.attention(x, layout), x)
        return _sum_normed(layer.mlp_norm, layer.mlp(x), x)


def _sum_normed(norm: Norm, x: Tensor, residual: Tensor) -> Tensor:
    normed = norm.of_sum(x, residual)
    assert isinstance(normed, Tensor)
    return normed


def _normed_before(layer: EncoderLayer, x: Tensor, layout: PackedLayout) -> Tensor:
    read = x if layer.attention_norm is None else layer.attention_norm.plain(x)
    normed = layer.mlp_norm.of_sum(layer.attention(read, layout), x)
    return x.add_(layer.mlp(normed))
