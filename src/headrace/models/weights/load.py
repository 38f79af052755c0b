"""Loads weights into a decoder, one matrix at a time: read into its final tensor, packed, and freed if packing
copied it."""

from __future__ import annotations

import itertools
import math
import mmap
import re
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.config import Quantization
from headrace.dist.collectives import StageLink, TensorGroup
from headrace.dist.mesh import Mesh
from headrace.errors import ModelError
from headrace.kernels import ops
from headrace.kernels.quantized import QuantizedWeight, kind_of, quantize
from headrace.models.checkpoint import Checkpoint
from headrace.models.decoder import Decoder, Layer
from headrace.models.embeddings import (
    DenseEmbeddings,
    Embeddings,
    NormedEmbeddings,
    QuantizedEmbeddings,
    ScaledEmbeddings,
)
from headrace.models.head import HeadLinear, PoolerHead
from headrace.models.latent import LatentAttention, rotary_order
from headrace.models.layers import Attention, HeadNorms, Mlp, Norm, QueryKeyNorms, WideNorms
from headrace.models.mixer import BothMixers, Mixer
from headrace.models.mixture import Mixture
from headrace.models.parallel import (
    ParallelWideNorms,
    ReceivedHidden,
    RowParallelLinear,
    VocabularyParallelEmbeddings,
    VocabularyParallelHead,
)
from headrace.models.pooler import HeadLayer
from headrace.models.quantized import BITS, kept_in_16_bits
from headrace.models.rope import cos_sin_table, head_order, query_scales
from headrace.models.shards import Shards
from headrace.models.sources import Progress
from headrace.models.spec import LatentSpec, ModelSpec, RopeSpec, Shape
from headrace.models.weights.gemma3n import as_gemma3n
from headrace.models.weights.load_recurrent import recurrent_mixer
from headrace.models.weights.random_weights import RandomWeights
from headrace.models.weights.source import ShardedSource, Slice, WeightSource, check_tensors
from headrace.models.weights.stored_linear import read_stored

_MAPPED_FROM_BYTES = 1 << 20
_EMBEDDINGS = "model.embed_tokens.weight"
_ROTATED = re.compile(r".*\.self_attn\.(q|k)_(proj|norm)\.(weight|bias)")
_ROTATED_OF_LATENTS = re.compile(r".*\.self_attn\.(q|q_b|kv_a)_proj\.weight")
_LATENT_EPS = 1e-6  # of the norms of latents, whatever the config says of the others


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
        reader = _Reader(
            source, shards, dtype, torch.device("meta"), quantization=None, progress=ignore_progress, group=group
        )
        with source.file_reader.announcing(device):
            _modules(reader, spec, tables, scales)
    at_load = quantization if checkpoint.spec.quantization is None else None  # stored ones are read as they are
    reader = _Reader(source, shards, dtype, device, quantization=at_load, progress=progress, group=group)
    modules = _modules(reader, spec, tables, scales)
    embeddings, norm = modules.embeddings, modules.norm
    if embeddings is not None:
        embeddings = _adjusted(embeddings, reader, spec, dtype)
    elif stages is not None:
        embeddings = ReceivedHidden(stages, spec.hidden_size, dtype)
    assert embeddings is not None
    decoder = Decoder(
        spec=spec,
        dtype=dtype,
        device=device,
        embeddings=embeddings,
        positions=modules.positions,
        head=modules.head,
        group=group,
        stages=stages,
        layers=modules.layers,
        norm=norm,
        head_norm=None if norm is None else _scaled_norm(norm, spec.logit_scale),
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


def _modules(reader: _Reader, spec: ModelSpec, tables: dict[RopeSpec, Tensor], scales: Tensor | None) -> _Modules:
    mesh = reader.shards.mesh
    # The largest matrices first: packing may copy them, and little else is loaded yet.
    embeddings, head = _both_ends(reader, spec)
    return _Modules(
        embeddings=embeddings,
        head=head,
        norm=reader.norm("model.norm") if mesh.is_last_stage else None,
        positions=_positions(reader, spec) if mesh.is_first_stage else None,
        layers=tuple(
            _layer(reader, spec, index, tables[spec.rope_of(index)], scales) for index in range(spec.num_layers)
        ),
    )


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


def _both_ends(reader: _Reader, spec: ModelSpec) -> tuple[Embeddings | None, ops.PackedLinear | None]:
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


def _own_ends(reader: _Reader, spec: ModelSpec) -> tuple[Embeddings | None, ops.PackedLinear | None]:
    """If they are tied and both here, one read serves both."""
    is_first, is_last = reader.shards.mesh.is_first_stage, reader.shards.mesh.is_last_stage
    stored = reader.source.stored_rows(_EMBEDDINGS) if reader.is_plain_cpu and is_first else None
    table: Tensor | None = None
    head: ops.PackedLinear | None = None
    if is_last and spec.pooler is None:
        bias = reader.tensor("lm_head.bias") if spec.head_bias else None
        weight = reader.tensor(_EMBEDDINGS if spec.tie_embeddings else "lm_head.weight")
        table = weight if spec.tie_embeddings else None
        head = ops.pack_linear(weight, bias)
    if not is_first:
        return None, head
    if stored is not None:
        return QuantizedEmbeddings(stored, spec.hidden_size), head
    return DenseEmbeddings(reader.tensor(_EMBEDDINGS) if table is None else table), head


def pooler_head(reader: _Reader, spec: ModelSpec) -> PoolerHead | None:
    """Returns the head of a pooling model; None: what it pools is its output."""
    if spec.pooler is None or not spec.pooler.layers:
        return None
    layers = [_head_linear(reader, spec, f"head.{i}", layer) for i, layer in enumerate(spec.pooler.layers)]
    return PoolerHead(tuple(layers))


def _head_linear(reader: _Reader, spec: ModelSpec, name: str, layer: HeadLayer) -> HeadLinear:
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


def _head_row(reader: _Reader, spec: ModelSpec, token: int) -> Tensor:  # [1, H] float32
    """Returns the LM head's row for a token."""
    row = torch.empty(1, spec.hidden_size, dtype=torch.float32, device=reader.device)
    name = _EMBEDDINGS if spec.tie_embeddings else "lm_head.weight"
    reader.source.source.fill(name, row, Slice(range(token, token + 1)))
    return row


def _positions(reader: _Reader, spec: ModelSpec) -> Tensor | None:
    if spec.num_positions is None:
        return None
    return reader.tensor("model.embed_positions.weight")[spec.position_offset :]


def _adjusted(embeddings: Embeddings, reader: _Reader, spec: ModelSpec, dtype: torch.dtype) -> Embeddings:
    """Returns the embeddings, normed or scaled."""
    if spec.embedding_norm:
        return NormedEmbeddings(embeddings, reader.norm("model.embed_norm"))
    if spec.embedding_scale is None:
        return embeddings
    rounded = torch.tensor(spec.embedding_scale).to(dtype).item()
    return ScaledEmbeddings(embeddings, rounded if spec.rounds_embedding_scale else spec.embedding_scale)


def _scaled_norm(norm: Norm, scale: float | None) -> Norm:
    """Returns the final norm for the head: its weights are scaled instead of the logits, which are linear in its
    output."""
    if scale is None:
        return norm
    return replace(norm, weight=norm.weight * scale, bias=None if norm.bias is None else norm.bias * scale)


def _layer(reader: _Reader, spec: ModelSpec, index: int, cos_sin: Tensor, query_scales: Tensor | None) -> Layer:
    prefix = f"model.layers.{reader.shards.layers.start + index}."
    attention_norm = reader.norm(prefix + "input_layernorm") if spec.pre_norms else None
    has_norm_of_its_own = spec.pre_norms and spec.mlp_norm_name != "input_layernorm"
    return Layer(
        attention_norm=attention_norm,
        mixer=_mixer(reader, spec, index, prefix, cos_sin, query_scales),
        attention_post_norm=reader.norm(prefix + "post_attention_layernorm") if spec.post_norms else None,
        mlp_norm=reader.norm(prefix + spec.mlp_norm_name) if has_norm_of_its_own else attention_norm,
        mlp=_mlp_or_mixture(reader, spec, index, prefix + "mlp."),
        mlp_post_norm=reader.norm(prefix + "post_feedforward_layernorm") if spec.post_norms else None,
        is_parallel=spec.is_parallel,
    )


def _mixer(
    reader: _Reader, spec: ModelSpec, index: int, prefix: str, cos_sin: Tensor, query_scales: Tensor | None
) -> Mixer | None:
    if spec.latent is not None:
        return _latent_attention(reader, spec, spec.latent, prefix + "self_attn.", cos_sin)
    recurrent = attention = None
    if spec.recurrent is not None and spec.has_state(index):
        recurrent = recurrent_mixer(reader, spec.recurrent, prefix + "recurrent.", eps=spec.norm_eps)
    if spec.has_attention(index):
        attention = _attention(reader, spec, index, prefix + "self_attn.", cos_sin, query_scales)
    if attention is not None and recurrent is not None:
        return BothMixers(attention, recurrent)
    return attention or recurrent


def _mlp_or_mixture(reader: _Reader, spec: ModelSpec, index: int, prefix: str) -> Mlp | Mixture | None:
    if spec.has_mixture(index):
        return _mixture(reader, spec, prefix)
    return _mlp(reader, spec, prefix) if spec.has_mlp(index) else None


def _mlp(reader: _Reader, spec: ModelSpec, prefix: str, *, adds_up: bool = True) -> Mlp:
    """`adds_up`: over the ranks; else the output is this rank's part of the sum."""
    before = ("gate_proj", "up_proj") if spec.is_gated else ("up_proj",)
    return Mlp(
        up=reader.linear(*(prefix + name for name in before), has_bias=spec.mlp_bias),
        down=reader.row_linear(prefix + "down_proj", has_bias=spec.mlp_bias, adds_up=adds_up),
        activation=spec.activation,
        is_gated=spec.is_gated,
    )


def _mixture(reader: _Reader, spec: ModelSpec, prefix: str) -> Mixture:
    mixture = spec.mixture
    assert mixture is not None
    own = reader.shards.experts
    experts = [f"{prefix}experts.{expert}." for expert in range(own.start, own.end)]
    before = ("gate_up_proj",) if mixture.interleaves else ("gate_proj", "up_proj")[not spec.is_gated :]
    ups = [tuple(name + part for part in before) for name in experts]
    downs: list[tuple[str, ...]] = [(name + "down_proj",) for name in experts]
    has_down_bias = spec.mlp_bias and reader.shards.has_expert_biases
    return Mixture(
        router=ops.pack_linear(
            reader.tensor(prefix + "router.weight"),
            reader.tensor(prefix + "router.bias") if mixture.router_bias else None,
        ),
        up=reader.experts(ups, interleaved=mixture.interleaves),
        down=reader.experts(downs),
        up_bias=reader.expert_biases(ups, interleaved=mixture.interleaves) if spec.mlp_bias else None,
        down_bias=reader.expert_biases(downs) if has_down_bias else None,
        shared=None if mixture.shared_size is None else _mlp(reader, spec, prefix + "shared_expert.", adds_up=False),
        num_chosen=mixture.num_chosen,
        routing=mixture.routing,
        weighs_input=mixture.weighs_input,
        activation=spec.activation,
        is_gated=spec.is_gated,
        correction=reader.float32(prefix + "router_correction.bias") if mixture.corrects_choice else None,
        scale=mixture.scale,
        jitter=mixture.jitter,
        num_groups=mixture.num_groups,
        num_groups_chosen=mixture.num_groups_chosen,
        shared_gate=ops.pack_linear(reader.tensor(prefix + "shared_expert_gate.weight"))
        if mixture.gates_shared
        else None,
        group=reader.group,
        experts=None if own.size == mixture.num_experts else own,
    )


def _attention(
    reader: _Reader, spec: ModelSpec, index: int, prefix: str, cos_sin: Tensor, query_scales: Tensor | None
) -> Attention:
    q_norm, k_norm = _head_norms(reader, spec, index, prefix)
    source = spec.kv_source(index)
    matrices = ("q_proj", "k_proj", "v_proj") if source is None else ("q_proj",)
    return Attention(
        qkv=reader.linear(*(prefix + name for name in matrices), has_bias=spec.qkv_bias),
        output=reader.row_linear(prefix + "o_proj", has_bias=spec.output_bias),
        q_norm=q_norm,
        k_norm=k_norm,
        wide_norms=_norms_of_all_heads(reader, spec, prefix),
        cos_sin=cos_sin,
        query_scales=query_scales if spec.grows_queries(index) else None,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        scale=_attention_scale(spec),
        window=spec.window_of(index, len(cos_sin)),
        slides=spec.windows_slide,
        softcap=spec.attention_softcap,
        eps=spec.norm_eps,
        clip=spec.clip_qkv,
        sinks=reader.float32(prefix + "sinks.bias") if spec.has_sinks else None,
        slopes=torch.tensor(spec.alibi_slopes, device=reader.device) if spec.alibi_slopes else None,
        gate=reader.linear(prefix + "output_gate_proj", has_bias=spec.qkv_bias) if spec.gates_attention else None,
    )


def _attention_scale(spec: ModelSpec) -> float:
    return 1.0 / math.sqrt(spec.head_dim) if spec.attention_scale is None else spec.attention_scale


def _latent_attention(
    reader: _Reader, spec: ModelSpec, latent: LatentSpec, prefix: str, cos_sin: Tensor
) -> LatentAttention:
    has_rank = latent.query_rank is not None
    before = ("q_a_proj" if has_rank else "q_proj", "kv_a_proj")
    kv_up = reader.tensor(prefix + "kv_b_proj.weight").unflatten(0, (spec.num_heads, -1))  # [Hq, still + value dim, R]
    return LatentAttention(
        down=reader.linear(*(prefix + name for name in before), has_bias=False),
        query_norm=Norm(reader.float32(prefix + "q_a_layernorm.weight"), None, _LATENT_EPS) if has_rank else None,
        query_up=reader.linear(prefix + "q_b_proj", has_bias=False) if has_rank else None,
        kv_norm=Norm(reader.float32(prefix + "kv_a_layernorm.weight"), None, _LATENT_EPS),
        key_up=kv_up[:, : latent.still_dim],
        value_up=kv_up[:, latent.still_dim :].transpose(1, 2),
        output=reader.row_linear(prefix + "o_proj", has_bias=False),
        cos_sin=cos_sin,
        latent=latent,
        scale=_attention_scale(spec),
    )


def _head_norms(reader: _Reader, spec: ModelSpec, index: int, prefix: str) -> tuple[Tensor | None, Tensor | None]:
    """Returns the norms of queries and keys. Norms without weights come after the rotation in the model; it keeps a
    head's length, so here they come before."""
    if spec.bare_qk_norm and index not in spec.ropeless_layers:
        ones = torch.ones(spec.head_dim, dtype=torch.float32, device=reader.device)
        return ones, ones
    if not spec.qk_norm:
        return None, None
    source = spec.kv_source(index)
    keys = prefix if source is None else f"model.layers.{source}.self_attn."
    return reader.norm_weight(prefix + "q_norm.weight"), reader.norm_weight(keys + "k_norm.weight")


def _norms_of_all_heads(reader: _Reader, spec: ModelSpec, prefix: str) -> QueryKeyNorms | None:
    if spec.head_qk_norm:
        weights = [reader.float32(f"{prefix}{side}_norm.weight") for side in "qk"]
        return HeadNorms(torch.cat(weights), spec.norm_eps)
    return _wide_norms(reader, spec, prefix) if spec.wide_qk_norm else None


def _wide_norms(reader: _Reader, spec: ModelSpec, prefix: str) -> QueryKeyNorms:
    queries, keys = (reader.norm_weight(f"{prefix}{side}_norm.weight") for side in "qk")
    shards = reader.shards
    if reader.group is None:
        return WideNorms(Norm(queries, None, spec.norm_eps), Norm(keys, None, spec.norm_eps))
    return ParallelWideNorms(
        q_weight=queries,
        k_weight=keys,
        eps=spec.norm_eps,
        num_queries=shards.whole.q_size,
        num_keys=shards.whole.kv_size,
        num_kv_copies=shards.heads.num_kv_copies,
        group=reader.group,
    )


class _Reader:
    """Allocates tensors in the decoder's type and device, lets the source fill them, and counts their bytes."""

    def __init__(
        self,
        source: WeightSource,
        shards: Shards,
        dtype: torch.dtype,
        device: torch.device,
        *,
        quantization: Quantization | None,
        progress: Progress,
        group: TensorGroup | None,
    ) -> None:
        self.source = ShardedSource(source, shards)
        self.shards = shards
        self.group = group
        self.num_bytes = 0
        self._spec = spec = shards.spec
        self._head_order = head_order(spec.head_dim, spec.rotary_dim, rotates_pairs=spec.rotates_pairs)
        self._scales = dict(spec.weight_scales)
        self._quantization = quantization  # of the layers' matrices, at load
        self._kept = kept_in_16_bits(shards.whole.num_layers)
        stored = spec.quantization
        self._keeps_stored = stored is not None and stored.stays_packed_on(device.type)
        self._dtype = dtype
        self.device = device
        self._progress = progress
        self._num_read = 0  # bytes of all tensors so far, in the decoder's type
        self._num_to_read = dtype.itemsize * shards.num_params

    @property
    def is_plain_cpu(self) -> bool:
        return self.device.type == "cpu" and self._dtype == torch.float32

    def linear(self, *names: str, has_bias: bool) -> ops.PackedLinear:
        """Returns one GEMM for several matrices that share their input: their rows are concatenated."""
        bias = self.tensor(*(f"{name}.bias" for name in names)) if has_bias else None
        weights = tuple(f"{name}.weight" for name in names)
        if self._keeps_stored and not self._scales:
            stored = read_stored(self.source, weights, self.device, self._row_order)
            if stored is not None:
                self._count_read(stored.values.numel())
                return self._quantized_linear(stored, bias)
        kind = None if weights[0] in self._kept else self._quantization
        if kind in ("int8", "int4"):
            return self._quantized_linear(quantize(self.tensor(*weights), kind), bias, was_read=True)
        packed = ops.pack_linear(self.tensor(*weights), bias, as_fp8=kind == "fp8")
        if packed.takes_fp8:
            num_params = sum(math.prod(self.source.shape(name)) for name in weights)
            self.num_bytes -= num_params * (self._dtype.itemsize - 1)
        return packed

    def _quantized_linear(
        self, weight: QuantizedWeight, bias: Tensor | None, *, was_read: bool = False
    ) -> ops.PackedLinear:
        """`was_read`: from a matrix whose bytes are counted."""
        num_params = weight.values.numel()
        self.num_bytes += int(num_params * BITS[kind_of(weight)] / 8)
        if was_read:
            self.num_bytes -= num_params * self._dtype.itemsize
        return ops.pack_quantized(weight, bias, self._dtype)

    def _row_order(self, name: str, num_rows: int) -> Tensor | None:
        """The order of rows that `_fill` gives to queries and keys."""
        if self._head_order is None or not _ROTATED.fullmatch(name):
            return None
        order = torch.tensor(self._head_order, device=self.device)
        return (torch.arange(0, num_rows, len(order), device=self.device)[:, None] + order).flatten()

    def row_linear(self, name: str, *, has_bias: bool, adds_up: bool = True) -> ops.PackedLinear:
        """Returns the GEMM of a matrix whose columns are divided over the ranks."""
        packed = self.linear(name, has_bias=has_bias and self.shards.has_row_biases)
        return packed if self.group is None or not adds_up else RowParallelLinear(packed, self.group)

    def experts(self, names: list[tuple[str, ...]], *, interleaved: bool = False) -> ops.PackedExperts:
        """Returns one grouped GEMM for the matrices of all experts; several matrices of one expert are concatenated
        by rows."""
        stack = self._stack(names, "weight", interleaved=interleaved)
        packed = ops.pack_experts(stack, as_fp8=self._quantization == "fp8")
        self.num_bytes += stack.numel() * (1 if packed.takes_fp8 else self._dtype.itemsize)
        return packed

    def expert_biases(self, names: list[tuple[str, ...]], *, interleaved: bool = False) -> Tensor:  # [E, N]
        stack = self._stack(names, "bias", interleaved=interleaved)
        self.num_bytes += stack.nbytes
        return stack

    def _stack(self, names: list[tuple[str, ...]], kind: str, *, interleaved: bool) -> Tensor:
        """`interleaved`: rows 2i become the first half, rows 2i + 1 the second."""
        wholes = [tuple(f"{name}.{kind}" for name in parts) for parts in names]
        shapes = [self.source.shape(name) for name in wholes[0]]
        stack = _allocate((len(names), sum(shape[0] for shape in shapes), *shapes[0][1:]), self._dtype, self.device)
        for expert, parts in zip(stack, wholes, strict=True):
            self._fill_rows(parts, expert)
            if interleaved:
                expert.copy_(torch.cat((expert[::2], expert[1::2])))
        return stack

    def norm(self, name: str) -> Norm:
        if self._spec.bare_norms:
            ones = torch.ones(self._spec.hidden_size, dtype=torch.float32, device=self.device)
            return Norm(ones, torch.zeros_like(ones), self._spec.norm_eps)
        weight = self.norm_weight(f"{name}.weight")
        bias = None
        if self._spec.layer_norm:
            bias = self.float32(f"{name}.bias") if self._spec.norm_bias else torch.zeros_like(weight)
        return Norm(weight, bias, self._spec.norm_eps)

    def norm_weight(self, name: str) -> Tensor:
        weight = self.float32(name)
        return weight.add_(self._spec.norm_offset) if self._spec.norm_offset else weight

    def float32(self, name: str) -> Tensor:
        """Reads a tensor in float32, whatever the decoder's type. For a norm's weight: adding the offset in a narrower
        type would lose digits."""
        out = _allocate(self.source.shape(name), torch.float32, self.device)
        self._fill(name, out)
        self.num_bytes += out.nbytes
        return out

    def tensor(self, *names: str) -> Tensor:
        shapes = [self.source.shape(name) for name in names]
        num_rows = [shape[0] for shape in shapes]
        out = _allocate((sum(num_rows), *shapes[0][1:]), self._dtype, self.device)
        self._fill_rows(names, out)
        self.num_bytes += out.nbytes
        return out

    def _fill_rows(self, names: tuple[str, ...], out: Tensor) -> None:
        num_rows = [self.source.shape(name)[0] for name in names]
        for name, part in zip(names, out.split(num_rows), strict=True):
            self._fill(name, part)

    def _fill(self, name: str, out: Tensor) -> None:
        self.source.fill(name, out)
        if self._spec.latent is not None:
            self._reorder_latent(name, out, self._spec.latent)
        elif self._head_order is not None and _ROTATED.fullmatch(name):
            sizes = (-1, len(self._head_order))
            heads = out.view(sizes) if "_norm." in name else out.unflatten(0, sizes)  # [heads, D, ...]
            heads.copy_(heads[:, self._head_order])
        if self._scales and (factor := self._scales.get(_name_in_layer(name))) is not None:
            out.mul_(factor)
        self._count_read(out.numel())

    def _count_read(self, num_params: int) -> None:
        self._num_read += num_params * self._dtype.itemsize
        self._progress(self._num_read, self._num_to_read)

    def _reorder_latent(self, name: str, out: Tensor, latent: LatentSpec) -> None:
        """Reorders the rows that rotate: the last of each query head, and of the one key."""
        if _ROTATED_OF_LATENTS.fullmatch(name):
            num_heads = 1 if ".kv_a_proj." in name else self._spec.num_heads
            rotated = out.unflatten(0, (num_heads, -1))[:, -latent.rotary_dim :]
            rotated.copy_(rotated[:, rotary_order(latent, rotates_pairs=self._spec.rotates_pairs)])


def _name_in_layer(name: str) -> str:
    """The name without the layer's prefix."""
    return name.split(".", maxsplit=3)[3] if name.startswith("model.layers.") else name


def _allocate(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates a tensor. On a CPU each matrix has a mapping of its own, so memory that packing copied is returned
    to the system at once."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < _MAPPED_FROM_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)


WeightReader = _Reader  # of the encoder's weights too
