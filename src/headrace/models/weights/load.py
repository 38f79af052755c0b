"""Loads weights into a decoder, one matrix at a time: read into its final tensor, packed, and freed if packing
copied it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.config import Quantization
from headrace.dist.collectives import StageLink, TensorGroup
from headrace.dist.mesh import Mesh
from headrace.errors import ModelError
from headrace.kernels import ops
from headrace.models.checkpoint import Checkpoint
from headrace.models.decoder import Decoder, Layer
from headrace.models.embeddings import Embeddings
from headrace.models.latent import LatentAttention
from headrace.models.layers import Attention, Norm
from headrace.models.mixer import BothMixers
from headrace.models.parallel import ReceivedHidden
from headrace.models.rope import cos_sin_table, query_scales
from headrace.models.shards import Shards
from headrace.models.sources import Progress
from headrace.models.spec import ModelSpec, RopeSpec
from headrace.models.weights.gemma3n import as_gemma3n
from headrace.models.weights.load_ends import (
    adjusted_embeddings,
    embeddings_and_head,
    learned_positions,
    pooler_head,
    scaled_norm,
)
from headrace.models.weights.load_layers import decoder_layer
from headrace.models.weights.random_weights import RandomWeights
from headrace.models.weights.reader import WeightReader
from headrace.models.weights.source import WeightSource, check_tensors


def ignore_progress(num_bytes: int, total: int | None) -> None:
    pass


def load_decoder(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quantization: Quantization | None = None,
    load_format: str = "auto",
    seed: int = 0,
    max_len: int | None = None,
    progress: Progress = ignore_progress,
    group: TensorGroup | None = None,
    stages: StageLink | None = None,
) -> Decoder:
    """Loads the checkpoint's model to `device`. `max_len` bounds the rotary tables of an engine with a shorter context.
    `progress` is called with the bytes loaded so far, and their total. With a `group` or `stages`, only this rank's
    part is read, and the decoder's spec has its sizes."""
    device = torch.device(device)
    source = weight_source(checkpoint, load_format, seed)
    check_tensors(source, checkpoint.spec, where=checkpoint.source)
    shards = Shards(checkpoint.spec, _mesh(group, stages))
    spec = shards.spec
    max_len = min(max_len or spec.max_model_len, spec.max_model_len)
    tables = cos_sin_tables(spec, max_len, device)
    scales = query_scales(spec.query_growth, max_len=max_len, device=device)
    if source.file_reader is not None:
        # Without values, to announce what will be read, and in which order.
        reader = WeightReader(
            source, shards, dtype, torch.device("meta"), quantization=None, progress=ignore_progress, group=group
        )
        with source.file_reader.announcing(device):
            _modules(reader, spec, tables, scales)
    at_load = quantization if checkpoint.spec.quantization is None else None  # stored ones are read as they are
    reader = WeightReader(source, shards, dtype, device, quantization=at_load, progress=progress, group=group)
    modules = _modules(reader, spec, tables, scales)
    norm = modules.norm
    decoder = Decoder(
        spec=spec,
        dtype=dtype,
        device=device,
        embeddings=_input_of_layers(modules.embeddings, reader, stages, dtype),
        positions=modules.positions,
        head=modules.head,
        group=group,
        stages=stages,
        layers=modules.layers,
        norm=norm,
        head_norm=None if norm is None else scaled_norm(norm, spec.logit_scale),
        max_len=max_len,
        pooler_head=None if norm is None else pooler_head(reader, spec),
        num_bytes=reader.num_bytes,
        num_bytes_read=source.num_bytes_read,
    )
    if spec.gemma3n is not None:
        decoder = as_gemma3n(decoder, reader, spec.gemma3n)
        decoder = replace(decoder, num_bytes=reader.num_bytes, num_bytes_read=source.num_bytes_read)
    progress(decoder.num_bytes, decoder.num_bytes)
    return decoder


class _Modules(NamedTuple):
    """What is read from files, of this rank's part."""

    embeddings: Embeddings | None  # None: not the first stage
    head: ops.PackedLinear | None  # None: not the last stage
    norm: Norm | None
    positions: Tensor | None
    layers: tuple[Layer, ...]


def _modules(reader: WeightReader, spec: ModelSpec, tables: dict[RopeSpec, Tensor], scales: Tensor | None) -> _Modules:
    mesh = reader.shards.mesh
    # The largest matrices first: packing may copy them, and little else is loaded yet.
    embeddings, head = embeddings_and_head(reader, spec)
    return _Modules(
        embeddings=embeddings,
        head=head,
        norm=reader.norm("model.norm") if mesh.is_last_stage else None,
        positions=learned_positions(reader, spec) if mesh.is_first_stage else None,
        layers=tuple(
            decoder_layer(reader, spec, index, tables[spec.rope_of(index)], scales) for index in range(spec.num_layers)
        ),
    )


def _input_of_layers(
    embeddings: Embeddings | None, reader: WeightReader, stages: StageLink | None, dtype: torch.dtype
) -> Embeddings:
    """Returns the embeddings; on a later stage, what receives the hidden states of the stage before."""
    spec = reader.shards.spec
    if embeddings is not None:
        return adjusted_embeddings(embeddings, reader, spec, dtype)
    assert stages is not None
    return ReceivedHidden(stages, spec.hidden_size, dtype)


def _mesh(group: TensorGroup | None, stages: StageLink | None) -> Mesh:
    connected = stages or group
    return Mesh() if connected is None else connected.mesh


def with_max_len(decoder: Decoder, max_len: int) -> Decoder:
    """The same weights with rotary tables of another length, as if they had been loaded with this `max_len`."""
    spec, device = decoder.spec, decoder.device
    max_len = min(max_len, spec.max_model_len)
    if max_len == decoder.max_len:
        return decoder
    tables = cos_sin_tables(spec, max_len, device)
    scales = query_scales(spec.query_growth, max_len=max_len, device=device)

    def resized(index: int, layer: Layer) -> Layer:
        mixer = layer.mixer
        if isinstance(mixer, LatentAttention):
            return replace(layer, mixer=replace(mixer, cos_sin=tables[spec.rope_of(index)]))
        attention = mixer.attention if isinstance(mixer, BothMixers) else mixer
        if not isinstance(attention, Attention):
            return layer
        attention = replace(
            attention,
            cos_sin=tables[spec.rope_of(index)],
            query_scales=scales if spec.grows_queries(index) else None,
            window=spec.window_of(index, max_len),
        )
        return replace(layer, mixer=replace(mixer, attention=attention) if isinstance(mixer, BothMixers) else attention)

    return replace(decoder, layers=tuple(itertools.starmap(resized, enumerate(decoder.layers))), max_len=max_len)


def cos_sin_tables(spec: ModelSpec, max_len: int, device: torch.device) -> dict[RopeSpec, Tensor]:
    """One table for each kind of rope that the layers have. Of latent attention only what rotates is a head."""
    head_dim = spec.head_dim if spec.latent is None else spec.latent.rotary_dim
    return {
        rope: cos_sin_table(rope, head_dim=head_dim, rotary_dim=spec.rotary_dim, max_len=max_len, device=device)
        for rope in {spec.rope_of(index) for index in range(spec.num_layers)}
    }


def weight_source(checkpoint: Checkpoint, load_format: str, seed: int) -> WeightSource:
    if load_format == "random":
        return RandomWeights(checkpoint.spec, seed=seed)
    if checkpoint.weights is None:
        raise ModelError(f"{checkpoint.source} was opened without weights; load it with load_format='random'")
    return checkpoint.weights
