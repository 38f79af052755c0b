"""The model families, one row each. A new family of this shape is a row; its parity test stands in tests/models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from headrace.errors import ModelError, UnsupportedModelError, nearest
from headrace.models.spec import Activation

Config = Mapping[str, Any]  # a config.json, or GGUF metadata under the same names
Windows = tuple[int | None, ...]


class Traits(TypedDict, total=False):
    """What sets a family apart from a plain Llama: fields of ModelSpec."""

    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    post_norms: bool
    norm_offset: float
    activation: Activation
    embedding_scale: float
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    windows: Windows


@dataclass(frozen=True)
class Family:
    """One row: how its models are named, what their config may leave out, and what sets them apart."""

    name: str  # as `model_type` in config.json
    architectures: tuple[str, ...]  # in config.json
    gguf_architectures: tuple[str, ...]  # general.architecture of a GGUF file
    traits: Callable[[Config], Traits]
    reads: frozenset[str] = frozenset()  # config keys that `traits` understands; others of their kind are refused
    defaults: Config = field(default_factory=dict)  # config keys that a file may leave out
    activations: tuple[str, ...] = ("silu", "swish")  # names that its activation goes by in config.json
    has_local_rope: bool = False  # layers with a window have a rope of their own
    states_stretched_len: bool = False  # its configs state the context after linear stretching
    gguf_keys: Mapping[str, str] = field(default_factory=dict)  # GGUF keys of its own -> their names in config.json
    gguf_rotates_pairs: bool = False  # its GGUF files store query and key rows in the order for neighbouring pairs


def _llama(config: Config) -> Traits:
    biased = bool(config.get("attention_bias"))
    return {"qkv_bias": biased, "output_bias": biased, "mlp_bias": bool(config.get("mlp_bias"))}


def _mistral(config: Config) -> Traits:
    return {"windows": (config["sliding_window"],) * config["num_hidden_layers"]}


def _qwen2(config: Config) -> Traits:
    return {"qkv_bias": True, "windows": _windows_by_layer(config)}


def _qwen3(config: Config) -> Traits:
    biased = bool(config.get("attention_bias"))
    return {"qkv_bias": biased, "output_bias": biased, "qk_norm": True, "windows": _windows_by_layer(config)}


def _windows_by_layer(config: Config) -> Windows:
    """Qwen's rule: with sliding windows on, `layer_types` names the layers, or else all from max_window_layers on."""
    num_layers = config["num_hidden_layers"]
    window = config["sliding_window"] if config["use_sliding_window"] else None
    kinds = config.get("layer_types")
    if kinds is None:
        first = config["max_window_layers"]
        return tuple(window if index >= first else None for index in range(num_layers))
    return _windows_of_kinds(kinds, window, num_layers)


def _windows_of_kinds(kinds: Sequence[str], window: int | None, num_layers: int) -> Windows:
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(
            f"layer_types must name full_attention or sliding_attention for each of {num_layers} layers, got {kinds}"
        )
    if window is None and "sliding_attention" in kinds:
        raise UnsupportedModelError("some layers are of sliding_attention, but the config sets no sliding window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _gemma(config: Config) -> Traits:
    biased = bool(config.get("attention_bias"))
    return {
        "qkv_bias": biased,
        "output_bias": biased,
        "norm_offset": 1.0,
        "activation": "gelu_tanh",
        "embedding_scale": math.sqrt(config["hidden_size"]),
    }


def _gemma2(config: Config) -> Traits:
    return _gemma(config) | {
        "post_norms": True,
        "attention_scale": 1.0 / math.sqrt(_number(config, "query_pre_attn_scalar")),
        "attention_softcap": _number_or_none(config, "attn_logit_softcapping"),
        "logit_softcap": _number_or_none(config, "final_logit_softcapping"),
        "windows": _windows_by_pattern(config),
    }


def _gemma3(config: Config) -> Traits:
    return _gemma2(config) | {"qk_norm": True}


def _windows_by_pattern(config: Config) -> Windows:
    """Gemma's rule: `layer_types` names the layers, or else every so many-th sees all, the others a window."""
    num_layers, kinds = config["num_hidden_layers"], config.get("layer_types")
    if kinds is None:
        period = config.get("_sliding_window_pattern") or config.get("sliding_window_pattern")
        if not isinstance(period, int) or period < 1:
            raise ModelError(f"sliding_window_pattern must be a positive integer, got {period!r}")
        kinds = ["sliding_attention" if (index + 1) % period else "full_attention" for index in range(num_layers)]
    return _windows_of_kinds(kinds, config["sliding_window"], num_layers)


def _number_or_none(config: Config, key: str) -> float | None:
    return None if config.get(key) is None else _number(config, key)


def _number(config: Config, key: str) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ModelError(f"the model's config needs a positive number {key}, got {value!r}")
    return float(value)


_QWEN_KEYS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_GEMMA2_KEYS = frozenset(
    {"attention_bias", "query_pre_attn_scalar", "final_logit_softcapping", "sliding_window", "layer_types"}
)
_GEMMA2_GGUF_KEYS = {
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "final_logit_softcapping": "final_logit_softcapping",
}

FAMILIES = (
    Family(
        name="llama",
        architectures=("LlamaForCausalLM",),
        gguf_architectures=("llama",),
        traits=_llama,
        reads=frozenset({"attention_bias", "mlp_bias"}),
        defaults={"max_position_embeddings": 2048},
        gguf_rotates_pairs=True,
    ),
    Family(
        name="mistral",
        architectures=("MistralForCausalLM",),
        gguf_architectures=(),  # stored as llama
        traits=_mistral,
        reads=frozenset({"sliding_window"}),
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    Family(
        name="qwen2",
        architectures=("Qwen2ForCausalLM",),
        gguf_architectures=("qwen2",),
        traits=_qwen2,
        reads=_QWEN_KEYS,
        defaults=_QWEN_DEFAULTS,
    ),
    Family(
        name="qwen3",
        architectures=("Qwen3ForCausalLM",),
        gguf_architectures=("qwen3",),
        traits=_qwen3,
        reads=_QWEN_KEYS | {"attention_bias"},
        defaults=_QWEN_DEFAULTS | {"head_dim": 128},
    ),
    Family(
        name="gemma",
        architectures=("GemmaForCausalLM",),
        gguf_architectures=("gemma",),
        traits=_gemma,
        reads=frozenset({"attention_bias"}),
        defaults=_GEMMA_DEFAULTS | {"num_key_value_heads": 16},
        activations=("gelu_pytorch_tanh", "gelu"),  # the first releases say gelu and mean the other
    ),
    Family(
        name="gemma2",
        architectures=("Gemma2ForCausalLM",),
        gguf_architectures=("gemma2",),
        traits=_gemma2,
        reads=_GEMMA2_KEYS | {"attn_logit_softcapping", "sliding_window_pattern"},
        defaults=_GEMMA_DEFAULTS
        | {
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
        },
        activations=("gelu_pytorch_tanh",),
        gguf_keys=_GEMMA2_GGUF_KEYS | {"attn_logit_softcapping": "attn_logit_softcapping"},
    ),
    Family(
        name="gemma3_text",  # gemma3 is the model with images
        architectures=("Gemma3ForCausalLM",),
        gguf_architectures=("gemma3",),
        traits=_gemma3,
        reads=_GEMMA2_KEYS | {"sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"},
        defaults=_GEMMA_DEFAULTS
        | {
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
            "sliding_window": None,  # configs state it
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        activations=("gelu_pytorch_tanh",),
        has_local_rope=True,
        states_stretched_len=True,
        gguf_keys=_GEMMA2_GGUF_KEYS | {"rope.freq_base_swa": "rope_local_base_freq"},
    ),
)


def family_of_config(config: Config) -> Family:
    names = config.get("architectures") or []
    if not names:
        return _by_model_type(config.get("model_type"))
    known = {name: family for family in FAMILIES for name in family.architectures}
    for name in names:
        if name in known:
            return known[name]
    raise _unknown("architecture", names[0], list(known))


def _by_model_type(model_type: object) -> Family:
    known = {family.name: family for family in FAMILIES}
    if model_type not in known:
        raise _unknown("model_type", model_type, list(known))
    return known[str(model_type)]


def family_of_gguf(architecture: object) -> Family:
    known = {name: family for family in FAMILIES for name in family.gguf_architectures}
    if architecture not in known:
        raise _unknown("GGUF architecture", architecture, list(known))
    return known[str(architecture)]


def _unknown(what: str, name: object, known: list[str]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{what} {name!r} is not supported{nearest(str(name), known)} (supported: {', '.join(known)})"
    )
