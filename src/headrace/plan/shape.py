"""What a plan needs to know about a model: weights by kind, cache bytes per token and FLOPs per token.

Built from the engine's own `ModelSpec`, or, for architectures that the engine does not run, from their config.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import ModelError
from headrace.models.spec import LatentSpec, ModelSpec, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of all layers that have them."""

    num_layers: int
    num_experts: int
    num_chosen: int  # per token
    params_each: int  # weights of one expert in one layer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder by numbers of weights. `linear_params` are read by every step, `experts` only in part."""

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int  # 1 for a cache that all heads share (MLA)
    max_model_len: int
    linear_params: int  # matrices of the layers, experts not included
    embedding_params: int
    head_params: int  # of the LM head, also if it is tied to the embeddings
    other_params: int  # norms, biases, routers, position embeddings
    is_tied: bool
    kv_elements_per_token: int
    attention_width: int  # query and value dimensions of all heads, averaged: FLOPs per pair and layer are 4 times this
    q_size: int
    kv_size: int
    mlp_width: int  # intermediate elements per token, summed over its experts
    experts: Experts | None = None
    windows: tuple[int | None, ...] = ()  # one per layer; empty: full attention everywhere
    state_bytes: int = 0  # recurrent states of one sequence, all layers
    dtype: str = "bfloat16"  # of the published checkpoint
    why_not_run: str | None = None  # why the engine cannot run it; None: it can
    spec: ModelSpec | None = field(default=None, compare=False)

    @property
    def expert_params(self) -> int:
        moe = self.experts
        return 0 if moe is None else moe.num_layers * moe.num_experts * moe.params_each

    @property
    def num_params(self) -> int:
        head = 0 if self.is_tied else self.head_params
        return self.linear_params + self.expert_params + self.embedding_params + head + self.other_params

    @property
    def active_params(self) -> int:
        """Weights in the GEMMs of one token, head included."""
        moe = self.experts
        routed = 0 if moe is None else moe.num_layers * moe.num_chosen * moe.params_each
        return self.linear_params + routed + self.head_params

    @property
    def has_mixture(self) -> bool:
        return self.experts is not None

    @property
    def stored_format(self) -> str | None:
        """The format of a quantized checkpoint's matrices, if a GPU keeps it: fp8, int8 (a CPU too) or int4."""
        stored = None if self.spec is None else self.spec.quantization
        return stored.kind if stored is not None and stored.stays_packed else None


def shape_of_spec(name: str, spec: ModelSpec) -> ModelShape:
    """The numbers of a model that the engine runs."""
    outer = spec.outer_shapes()
    table = spec.vocab_size * spec.hidden_size
    mixed = () if spec.mixture is None else spec.mixture.layers
    linear = other = params_each = 0
    for index, count in _kinds_of_layers(spec):
        shapes = spec.layer_shapes(index)
        of_experts = {key: s for key, s in shapes.items() if ".mlp.experts." in key and _is_matrix(key)}
        matrices = {key: s for key, s in shapes.items() if key not in of_experts and _is_matrix(key)}
        linear += count * _size(matrices.values())
        other += count * (_size(shapes.values()) - _size(matrices.values()) - _size(of_experts.values()))
        if of_experts and spec.mixture is not None:
            params_each = _size(of_experts.values()) // spec.mixture.num_experts
    experts = None
    if spec.mixture is not None and params_each:
        experts = Experts(
            num_layers=len(mixed),
            num_experts=spec.mixture.num_experts,
            num_chosen=spec.mixture.num_chosen,
            params_each=params_each,
        )
    latent = spec.latent
    return ModelShape(
        name=name,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        max_model_len=spec.max_model_len,
        linear_params=linear,
        embedding_params=table,
        head_params=table,
        other_params=other + _size(outer.values()) - table * (1 if spec.tie_embeddings else 2),
        is_tied=spec.tie_embeddings,
        kv_elements_per_token=spec.kv_elements_per_token,
        attention_width=spec.q_size * spec.num_attention_layers // spec.num_cache_layers
        if latent is None
        else spec.num_heads * _latent_width(latent),
        q_size=spec.q_size,
        kv_size=spec.kv_size if latent is None else latent.cache_dim // 2,
        mlp_width=spec.mlp_width,
        experts=experts,
        windows=spec.windows if any(spec.windows) else (),
        dtype=spec.dtype,
        state_bytes=spec.state_bytes(2),
        spec=spec,
    )


def shape_of_mla(name: str, config: Mapping[str, Any], why_not_run: str) -> ModelShape:
    """Multi-head latent attention that the engine does not run, with a cache of one latent vector per token and
    layer."""
    hidden, layers, heads = (_number(config, k) for k in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    latent, rope = _number(config, "kv_lora_rank"), _number(config, "qk_rope_head_dim")
    nope, value = _number(config, "qk_nope_head_dim"), _number(config, "v_head_dim")
    q_rank = config.get("q_lora_rank")
    q_size = heads * (nope + rope)
    queries = hidden * q_rank + q_rank * q_size if q_rank else hidden * q_size
    keys_values = hidden * (latent + rope) + latent * heads * (nope + value)
    attention = queries + keys_values + heads * value * hidden
    num_dense = int(config.get("first_k_dense_replace", 0))
    num_mixed = layers - num_dense
    expert_size, num_experts = _number(config, "moe_intermediate_size"), _number(config, "n_routed_experts")
    shared = 3 * hidden * expert_size * int(config.get("n_shared_experts") or 0)
    dense_width, num_chosen = _number(config, "intermediate_size"), _number(config, "num_experts_per_tok")
    linear = layers * attention + num_dense * 3 * hidden * dense_width + num_mixed * shared
    vocab = _number(config, "vocab_size")
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=vocab,
        num_heads=heads,
        num_kv_heads=1,
        max_model_len=_number(config, "max_position_embeddings"),
        linear_params=linear,
        embedding_params=vocab * hidden,
        head_params=vocab * hidden,
        other_params=layers * (2 * hidden + latent + (q_rank or 0)) + hidden + num_mixed * hidden * num_experts,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        kv_elements_per_token=layers * (latent + rope),
        attention_width=heads * _latent_width(LatentSpec(q_rank, latent, nope, rope, value)),
        q_size=q_size,
        kv_size=(latent + rope) // 2,
        mlp_width=max(dense_width if num_dense else 0, (num_chosen + 1) * expert_size),
        experts=Experts(
            num_layers=num_mixed, num_experts=num_experts, num_chosen=num_chosen, params_each=3 * hidden * expert_size
        ),
        why_not_run=why_not_run,
    )


def _latent_width(latent: LatentSpec) -> int:
    """Half of a head's operations per token of the context, in the cache's space: scores over latents and what rotates,
    values over latents."""
    return (2 * latent.kv_rank + latent.rotary_dim) // 2


def _kinds_of_layers(spec: ModelSpec) -> list[tuple[int, int]]:
    """An example of each kind of layer, and how many there are: by mixer, with experts and without."""
    kinds: dict[tuple[str, bool], list[int]] = {}
    for index in range(spec.num_layers):
        kinds.setdefault((spec.mixer_of(index), spec.has_mixture(index)), []).append(index)
    return [(layers[0], len(layers)) for layers in kinds.values()]


def _is_matrix(name: str) -> bool:
    return name.endswith("_proj.weight")


def _size(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"the model's config needs a positive integer {key}, got {value!r}")
    return value
