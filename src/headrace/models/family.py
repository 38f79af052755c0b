"""What a row of the table of families contains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from headrace.models.recurrent_specs import RecurrentSpec
from headrace.models.spec import Activation, Gemma3nSpec, LatentSpec, MixerKind, MixtureSpec, QueryGrowth, Shape
from headrace.models.stored_tensors import AS_NAMED, Stored

Config = Mapping[str, Any]  # a config.json, or GGUF metadata under the same names
Windows = tuple[int | None, ...]


class Traits(TypedDict, total=False):
    """What distinguishes a family from a plain Llama: fields of ModelSpec."""

    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_bias: bool
    norms_head: bool
    qk_norm: bool
    wide_qk_norm: bool
    head_qk_norm: bool
    bare_qk_norm: bool
    layer_norm: bool
    norm_bias: bool
    norm_eps: float
    pre_norms: bool
    post_norms: bool
    norm_offset: float
    bare_norms: bool
    embedding_norm: bool
    alibi_slopes: tuple[float, ...]
    has_sinks: bool
    clip_qkv: float | None
    is_parallel: bool
    shares_norm: bool
    is_gated: bool
    activation: Activation
    mixture: MixtureSpec
    query_growth: QueryGrowth
    ropeless_layers: tuple[int, ...]
    latent: LatentSpec
    gemma3n: Gemma3nSpec
    recurrent: RecurrentSpec
    mixers: tuple[MixerKind, ...]
    has_single_blocks: bool
    gates_attention: bool
    weight_scales: tuple[tuple[str, float], ...]
    num_positions: int
    position_offset: int
    embedding_scale: float
    rounds_embedding_scale: bool
    attention_scale: float
    attention_softcap: float | None
    logit_scale: float
    logit_softcap: float | None
    windows: Windows
    windows_slide: bool
    rotates_pairs: bool


def _as_it_is(config: Config) -> Config:
    return config


def _nothing(tensors: Mapping[str, Shape]) -> Config:
    return {}


def _nothing_computed(values: Config) -> Config:
    return {}


@dataclass(frozen=True)
class Family:
    """One row: how its models are named, which config keys have defaults, and what distinguishes them."""

    name: str  # as `model_type` in config.json
    models: str  # names that users know
    architectures: tuple[str, ...]  # in config.json
    gguf_architectures: tuple[str, ...]  # general.architecture of a GGUF file
    traits: Callable[[Config], Traits]
    reads: frozenset[str] = frozenset()  # config keys that `traits` reads; others of their kind are refused
    renamed: Mapping[str, str] = field(default_factory=dict)  # its own config keys -> the common ones
    defaults: Config = field(default_factory=dict)  # config keys that a file may omit
    derived: Callable[[Config], Config] = _as_it_is  # adds common keys that follow from its own
    implies: Config = field(default_factory=dict)  # keys that may be stated, but only as what is always the case
    quantizations: frozenset[str] = frozenset()  # quant_method of weights that are dequantized at load
    activations: tuple[str, ...] = ("silu", "swish")  # names of its activation in config.json
    has_rope: bool = True
    widens_by: int | None = None  # MLP width as a multiple of the hidden size, where the config omits it
    stored: Stored = AS_NAMED  # how its checkpoints store tensors
    rope_keys: frozenset[str] = frozenset()  # its own keys among the rope's parameters
    has_mrope: bool = False  # its rope has sections for images
    has_local_rope: bool = False  # layers with a window have a rope of their own
    states_stretched_len: bool = False  # its configs state the context length after linear rope scaling
    gguf_keys: Mapping[str, str] = field(default_factory=dict)  # its own GGUF keys -> their names in config.json
    gguf_further: Mapping[str, str] = field(default_factory=dict)  # the same, for keys that its files may omit
    gguf_mark: str | None = None  # a GGUF key that only its files have, if another family has the same architecture
    gguf_mark_value: int | None = None  # of that key; None: any
    gguf_reads: frozenset[str] = frozenset()  # GGUF keys that `gguf_computes` reads
    gguf_computes: Callable[[Config], Config] = _nothing_computed  # config keys that follow from several GGUF keys
    gguf_implies: Config = field(default_factory=dict)  # what its GGUF files omit and llama.cpp assumes
    gguf_yarn: Callable[[Config], Config] = _nothing_computed  # yarn's parameters that follow from GGUF keys
    gguf_tells: Callable[[Mapping[str, Shape]], Config] = _nothing  # config keys that follow from a file's tensors
    gguf_rotates_pairs: bool = False  # its GGUF files store query and key rows in the order for neighbouring pairs
