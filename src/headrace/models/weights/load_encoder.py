"""Loads the weights of an encoder."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.dist.mesh import Mesh
from headrace.models.checkpoint import Checkpoint
from headrace.models.encoder import Encoder, EncoderAttention, EncoderLayer
from headrace.models.encoder_spec import EncoderSpec
from headrace.models.layers import Mlp
from headrace.models.shards import Shards
from headrace.models.sources import Progress
from headrace.models.weights.load import cos_sin_tables, weight_source
from headrace.models.weights.load_ends import learned_positions, pooler_head
from headrace.models.weights.reader import WeightReader
from headrace.models.weights.source import check_tensors


def load_encoder(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    seed: int = 0,
    max_len: int | None = None,
    progress: Progress = lambda num_bytes, total: None,
) -> Encoder:
    """See `load_decoder`. The tables of positions have the model's full length, whatever `max_len` is."""
    spec, device = checkpoint.spec, torch.device(device)
    assert isinstance(spec, EncoderSpec)
    source = weight_source(checkpoint, load_format, seed)
    check_tensors(source, spec, where=checkpoint.source)
    reader = WeightReader(source, Shards(spec, Mesh()), dtype, device, quantization=None, progress=progress, group=None)
    tables = cos_sin_tables(spec, spec.max_model_len, device)
    encoder = Encoder(
        spec=spec,
        dtype=dtype,
        device=device,
        table=reader.tensor("model.embed_tokens.weight"),
        positions=learned_positions(reader, spec),
        types=_types(reader, spec),
        embedding_norm=reader.norm("model.embed_norm"),
        layers=tuple(_layer(reader, spec, index, tables[spec.rope_of(index)]) for index in range(spec.num_layers)),
        norm=None if spec.norms_after else reader.norm("model.norm"),
        pooler_head=pooler_head(reader, spec),
        max_len=min(max_len or spec.max_model_len, spec.max_model_len),
        num_bytes=reader.num_bytes,
        num_bytes_read=source.num_bytes_read,
    )
    progress(encoder.num_bytes, encoder.num_bytes)
    return encoder


def _types(reader: WeightReader, spec: EncoderSpec) -> Tensor | None:
    return reader.tensor("model.embed_types.weight") if spec.num_types else None


def _layer(reader: WeightReader, spec: EncoderSpec, index: int, cos_sin: Tensor) -> EncoderLayer:
    prefix = f"model.layers.{index}."
    attention = EncoderAttention(
        qkv=reader.linear(*(f"{prefix}self_attn.{side}_proj" for side in "qkv"), has_bias=spec.qkv_bias),
        output=reader.linear(f"{prefix}self_attn.o_proj", has_bias=spec.output_bias),
        cos_sin=None if spec.rope.kind == "none" else cos_sin,
        num_heads=spec.num_heads,
        scale=1.0 / math.sqrt(spec.head_dim),
        reach=spec.window_of(index, len(cos_sin)),
    )
    before = ("gate_proj", "up_proj") if spec.is_gated else ("up_proj",)
    return EncoderLayer(
        attention=attention,
        attention_norm=reader.norm(prefix + "attention_norm") if spec.has_attention_norm(index) else None,
        mlp=Mlp(
            up=reader.linear(*(f"{prefix}mlp.{name}" for name in before), has_bias=spec.mlp_bias),
            down=reader.linear(prefix + "mlp.down_proj", has_bias=spec.mlp_bias),
            activation=spec.activation,
            is_gated=spec.is_gated,
        ),
        mlp_norm=reader.norm(prefix + "mlp_norm"),
    )
