"""The model families, one row each. A new family of this shape is a row; its parity test stands in tests/models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from headrace.errors import UnsupportedModelError, nearest

Config = Mapping[str, Any]  # a config.json, or GGUF metadata under the same names
Windows = tuple[int | None, ...]


class Traits(TypedDict, total=False):
    """What sets a family apart from a plain Llama: fields of ModelSpec."""

    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: Windows


@dataclass(frozen=True)
class Family:
    """One row: how its models are named, what their config may leave out, and what sets them apart."""

    name: str
    architectures: tuple[str, ...]  # in config.json
    gguf_architectures: tuple[str, ...]  # general.architecture of a GGUF file
    traits: Callable[[Config], Traits]
    reads: frozenset[str] = frozenset()  # config keys that `traits` understands; others of their kind are refused
    defaults: Config = field(default_factory=dict)  # config keys that a file may leave out
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
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(
            f"layer_types must name full_attention or sliding_attention for each of {num_layers} layers, got {kinds}"
        )
    if window is None and "sliding_attention" in kinds:
        raise UnsupportedModelError("layer_types asks for sliding_attention, but the config sets no sliding window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


_QWEN_KEYS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
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
