"""Loads the layers of a decoder: mixers, MLPs and mixtures of experts, with their norms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.kernels import ops
from headrace.models.decoder import Layer
from headrace.models.latent import LatentAttention
from headrace.models.layers import Attention, HeadNorms, Mlp, Norm, QueryKeyNorms, WideNorms
from headrace.models.mixer import BothMixers, Mixer
from headrace.models.mixture import Mixture
from headrace.models.parallel import ParallelWideNorms
from headrace.models.spec import LatentSpec, ModelSpec
from headrace.models.weights.key_units import units_of_normed, units_of_projected
from headrace.models.weights.load_recurrent import recurrent_mixer
from headrace.models.weights.reader import WeightReader

_LATENT_EPS = 1e-6  # of the norms of latents, whatever the config says of the others


def decoder_layer(
    reader: WeightReader, spec: ModelSpec, index: int, cos_sin: Tensor, query_scales: Tensor | None
) -> Layer:
    prefix = f"model.layers.{reader.shards.layers.start + index}."
    attention_norm = reader.norm(prefix + "input_layernorm") if spec.pre_norms else None
    has_norm_of_its_own = spec.pre_norms and spec.mlp_norm_name != "input_layernorm"
    return Layer(
        attention_norm=attention_norm,
        mixer=_mixer(reader, spec, index, prefix, cos_sin, query_scales, attention_norm),
        attention_post_norm=reader.norm(prefix + "post_attention_layernorm") if spec.post_norms else None,
        mlp_norm=reader.norm(prefix + spec.mlp_norm_name) if has_norm_of_its_own else attention_norm,
        mlp=_mlp_or_mixture(reader, spec, index, prefix + "mlp."),
        mlp_post_norm=reader.norm(prefix + "post_feedforward_layernorm") if spec.post_norms else None,
        is_parallel=spec.is_parallel,
    )


def _mixer(
    reader: WeightReader,
    spec: ModelSpec,
    index: int,
    prefix: str,
    cos_sin: Tensor,
    query_scales: Tensor | None,
    norm: Norm | None,
) -> Mixer | None:
    if spec.latent is not None:
        return _latent_attention(reader, spec, spec.latent, prefix + "self_attn.", cos_sin)
    recurrent = attention = None
    if spec.recurrent is not None and spec.has_state(index):
        recurrent = recurrent_mixer(reader, spec.recurrent, prefix + "recurrent.", eps=spec.norm_eps)
    if spec.has_attention(index):
        attention = _attention(reader, spec, index, prefix + "self_attn.", cos_sin, query_scales, norm)
    if attention is not None and recurrent is not None:
        return BothMixers(attention, recurrent)
    return attention or recurrent


def _mlp_or_mixture(reader: WeightReader, spec: ModelSpec, index: int, prefix: str) -> Mlp | Mixture | None:
    if spec.has_mixture(index):
        return _mixture(reader, spec, prefix)
    return _mlp(reader, spec, prefix) if spec.has_mlp(index) else None


def _mlp(reader: WeightReader, spec: ModelSpec, prefix: str, *, adds_up: bool = True) -> Mlp:
    """`adds_up`: over the ranks; else the output is this rank's part of the sum."""
    before = ("gate_proj", "up_proj") if spec.is_gated else ("up_proj",)
    return Mlp(
        up=reader.linear(*(prefix + name for name in before), has_bias=spec.mlp_bias),
        down=reader.row_linear(prefix + "down_proj", has_bias=spec.mlp_bias, adds_up=adds_up),
        activation=spec.activation,
        is_gated=spec.is_gated,
    )


def _mixture(reader: WeightReader, spec: ModelSpec, prefix: str) -> Mixture:
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
    reader: WeightReader,
    spec: ModelSpec,
    index: int,
    prefix: str,
    cos_sin: Tensor,
    query_scales: Tensor | None,
    norm: Norm | None,
) -> Attention:
    q_norm, k_norm = _head_norms(reader, spec, index, prefix)
    wide_norms = _norms_of_all_heads(reader, spec, prefix)
    gains = _key_gains(spec, k_norm, wide_norms)
    qkv, key_units = _qkv(reader, spec, index, prefix, norm, gains)
    return Attention(
        qkv=qkv,
        output=reader.row_linear(prefix + "o_proj", has_bias=spec.output_bias),
        q_norm=q_norm,
        k_norm=k_norm,
        wide_norms=wide_norms,
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
        key_units=key_units,
    )


def _qkv(
    reader: WeightReader, spec: ModelSpec, index: int, prefix: str, norm: Norm | None, gains: Tensor | None
) -> tuple[ops.PackedLinear, tuple[float, ...]]:
    """Returns the projection, and the units of its keys. `gains`: [Hkv, D], of norms of the keys."""
    if spec.kv_source(index) is not None:
        return reader.linear(prefix + "q_proj", has_bias=spec.qkv_bias), ()
    qkv = reader.matrix(*(f"{prefix}{side}_proj" for side in "qkv"), has_bias=spec.qkv_bias)
    if gains is not None:
        return reader.pack(qkv), units_of_normed(gains)
    sizes = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
    units = units_of_projected(qkv, norm, **sizes)
    return reader.pack(qkv), units


def _key_gains(spec: ModelSpec, k_norm: Tensor | None, wide_norms: QueryKeyNorms | None) -> Tensor | None:  # [Hkv, D]
    if k_norm is not None:
        return k_norm.expand(spec.num_kv_heads, -1)
    return None if wide_norms is None else wide_norms.key_gains(spec.num_kv_heads)


def _attention_scale(spec: ModelSpec) -> float:
    return 1.0 / math.sqrt(spec.head_dim) if spec.attention_scale is None else spec.attention_scale


def _latent_attention(
    reader: WeightReader, spec: ModelSpec, latent: LatentSpec, prefix: str, cos_sin: Tensor
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


def _head_norms(reader: WeightReader, spec: ModelSpec, index: int, prefix: str) -> tuple[Tensor | None, Tensor | None]:
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


def _norms_of_all_heads(reader: WeightReader, spec: ModelSpec, prefix: str) -> QueryKeyNorms | None:
    if spec.head_qk_norm:
        weights = [reader.float32(f"{prefix}{side}_norm.weight") for side in "qk"]
        return HeadNorms(torch.cat(weights), spec.norm_eps)
    return _wide_norms(reader, spec, prefix) if spec.wide_qk_norm else None


def _wide_norms(reader: WeightReader, spec: ModelSpec, prefix: str) -> QueryKeyNorms:
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
