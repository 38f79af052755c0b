"""Loads what stands before and after the layers: embeddings, LM head, and the head of a pooling model."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headrace.kernels import ops
from headrace.models.embeddings import (
    DenseEmbeddings,
    Embeddings,
    NormedEmbeddings,
    QuantizedEmbeddings,
    ScaledEmbeddings,
)
from headrace.models.head import HeadLinear, PoolerHead
from headrace.models.layers import Norm
from headrace.models.parallel import VocabularyParallelEmbeddings, VocabularyParallelHead
from headrace.models.pooler import HeadLayer
from headrace.models.spec import ModelSpec
from headrace.models.weights.reader import WeightReader
from headrace.models.weights.source import Slice

_EMBEDDINGS = "model.embed_tokens.weight"


def embeddings_and_head(reader: WeightReader, spec: ModelSpec) -> tuple[Embeddings | None, ops.PackedLinear | None]:
    """Returns the embeddings, if this is the first stage, and the head, if it is the last one, each of this rank's part
    of the vocabulary."""
    embeddings, head = _own_ends(reader, spec)
    group, shards = reader.group, reader.shards
    if group is None:
        return embeddings, head
    return (
        None if embeddings is None else VocabularyParallelEmbeddings(embeddings, shards.vocabulary, group),
        None if head is None else VocabularyParallelHead(head, group, shards.vocabulary_sizes),
    )


def _own_ends(reader: WeightReader, spec: ModelSpec) -> tuple[Embeddings | None, ops.PackedLinear | None]:
    """If they are tied and both here, one read serves both."""
    is_first, is_last = reader.shards.mesh.is_first_stage, reader.shards.mesh.is_last_stage
    stored = reader.source.stored_rows(_EMBEDDINGS) if reader.is_plain_cpu and is_first else None
    table: Tensor | None = None
    head: ops.PackedLinear | None = None
    if is_last and spec.pooler is None:
        head, table = _head(reader, spec)
    if not is_first:
        return None, head
    if stored is not None:
        return QuantizedEmbeddings(stored, spec.hidden_size), head
    return DenseEmbeddings(reader.tensor(_EMBEDDINGS) if table is None else table), head


def _head(reader: WeightReader, spec: ModelSpec) -> tuple[ops.PackedLinear, Tensor | None]:
    """Returns the head, and the table of embeddings if it was read for it."""
    bias = reader.tensor("lm_head.bias") if spec.head_bias else None
    name = _EMBEDDINGS if spec.tie_embeddings else "lm_head.weight"
    packed = None if spec.norms_head else reader.head(name, bias)
    if packed is not None:
        return packed, None
    weight = reader.tensor(name)
    table = weight if spec.tie_embeddings else None
    if spec.norms_head:
        weight = torch.nn.functional.normalize(weight.float()).to(weight.dtype)
    return reader.plain(weight, bias), table


def pooler_head(reader: WeightReader, spec: ModelSpec) -> PoolerHead | None:
    """Returns the head of a pooling model; None: what it pools is its output."""
    if spec.pooler is None or not spec.pooler.layers:
        return None
    layers = [_head_linear(reader, spec, f"head.{i}", layer) for i, layer in enumerate(spec.pooler.layers)]
    return PoolerHead(tuple(layers))


def _head_linear(reader: WeightReader, spec: ModelSpec, name: str, layer: HeadLayer) -> HeadLinear:
    if layer.from_tokens:
        first, second = (_head_row(reader, spec, token) for token in layer.from_tokens)
        return HeadLinear(second - first, None, layer.activation)
    return HeadLinear(
        reader.float32(f"{name}.weight"),
        reader.float32(f"{name}.bias") if layer.has_bias else None,
        layer.activation,
        reader.float32(f"{name}.norm.weight") if layer.has_norm else None,
        reader.float32(f"{name}.norm.bias") if layer.has_norm_bias else None,
        spec.norm_eps,
    )


def _head_row(reader: WeightReader, spec: ModelSpec, token: int) -> Tensor:  # [1, H] float32
    """Returns the LM head's row for a token."""
    row = torch.empty(1, spec.hidden_size, dtype=torch.float32, device=reader.device)
    name = _EMBEDDINGS if spec.tie_embeddings else "lm_head.weight"
    reader.source.source.fill(name, row, Slice(range(token, token + 1)))
    return row


def learned_positions(reader: WeightReader, spec: ModelSpec) -> Tensor | None:
    if spec.num_positions is None:
        return None
    return reader.tensor("model.embed_positions.weight")[spec.position_offset :]


def adjusted_embeddings(
    embeddings: Embeddings, reader: WeightReader, spec: ModelSpec, dtype: torch.dtype
) -> Embeddings:
    """Returns the embeddings, normed or scaled."""
    if spec.embedding_norm:
        return NormedEmbeddings(embeddings, reader.norm("model.embed_norm"))
    if spec.embedding_scale is None:
        return embeddings
    rounded = torch.tensor(spec.embedding_scale).to(dtype).item()
    return ScaledEmbeddings(embeddings, rounded if spec.rounds_embedding_scale else spec.embedding_scale)


def scaled_norm(norm: Norm, scale: float | None) -> Norm:
    """Returns the final norm for the head: its weights are scaled instead of the logits, which are linear in its
    output."""
    if scale is None:
        return norm
    return replace(norm, weight=norm.weight * scale, bias=None if norm.bias is None else norm.bias * scale)
