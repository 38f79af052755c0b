"""config.json to a ModelSpec. What would be computed wrongly is refused here, never ignored."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from headrace.errors import ModelError, UnsupportedModelError
from headrace.models.families import family_of_config
from headrace.models.family import Config, Family, Windows
from headrace.models.quantized import StoredQuantization, read_quantization
from headrace.models.spec import ModelSpec, RopeKind, RopeSpec

# Keys that look like they affect the computation; if nothing reads such a key, the config is refused.
_TOUCHES_COMPUTATION = re.compile(
    r"attn|attention|rope|rotary|window|expert|moe|softcap|multiplier|scal|sink|norm|bias|quant|lora|layer_types|alibi|clip"
)
_READ_OR_HARMLESS = frozenset(
    {
        "num_attention_heads",
        "attention_dropout",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_pdrop",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "rotary_dim",
        "quantization_config",
    }
)
_ROPE_KEYS: dict[RopeKind, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "attn_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "finetuned",
        }
    ),
    "longrope": frozenset({"factor", "attention_factor", "short_factor", "long_factor"}),
}
# Keys that only repeat another one. With another value than that one they are refused.
_REPEATED = {
    "sliding_window_size": "sliding_window",
    "layer_norm_epsilon": "rms_norm_eps",
    "layer_norm_eps": "rms_norm_eps",
    "experts_per_token": "num_experts_per_tok",
}
# What a multimodal checkpoint may state once for the whole model. Its text_config comes first, except for the head:
# there the default of a text model may be written although the head is the whole model's.
_WHOLE_MODEL = (
    "dtype",
    "torch_dtype",
    "quantization_config",
    "tie_word_embeddings",
    "eos_token_id",
    "bos_token_id",
)
# Positions of images in Qwen's multimodal models; for text their three parts are equal, and the rope is a plain one.
_MROPE_KEYS = frozenset({"mrope_section", "mrope_interleaved"})


def spec_from_config(config: Config, generation: Config | None = None) -> ModelSpec:
    """Builds the spec from config.json; generation_config.json may add end-of-sequence ids."""
    family = family_of_config(config)
    renamed = {family.renamed.get(key, key): value for key, value in _text_config(config).items()}
    return build_spec(family, renamed, generation or {})


def _text_config(config: Config) -> Config:
    """Merges the text model's config of a multimodal model with the settings of the whole checkpoint."""
    if "text_config" not in config:
        return config
    whole = {key: config[key] for key in _WHOLE_MODEL if config.get(key) is not None}
    tied = {"tie_word_embeddings": whole["tie_word_embeddings"]} if "tie_word_embeddings" in whole else {}
    text = {key: value for key, value in config["text_config"].items() if value is not None or key not in whole}
    return whole | text | tied


def build_spec(family: Family, config: Config, generation: Config) -> ModelSpec:
    """Builds the spec from a config with the common key names."""
    config = family.derived({**family.defaults, **config})
    _refuse_ignored(family, config)
    hidden_size, num_heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    num_kv_heads = num_heads if config.get("num_key_value_heads") is None else positive(config, "num_key_value_heads")
    head_dim = hidden_size // num_heads if config.get("head_dim") is None else positive(config, "head_dim")
    _check_heads(num_heads, num_kv_heads, head_dim)
    rope, local_rope = _ropes(family, config)
    max_model_len = _max_model_len(family, config, rope)
    num_layers = positive(config, "num_hidden_layers")
    traits = family.traits(config)
    windows = _checked_windows(traits.get("windows", (None,) * num_layers))
    traits["windows"] = _useful_windows(windows, max_model_len) if local_rope is None else windows
    traits.setdefault("norm_eps", float(config.get("rms_norm_eps", 1e-6)))
    return ModelSpec(
        family=family.name,
        vocab_size=positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_intermediate_size(family, config),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_model_len=max_model_len,
        rotary_dim=_rotary_dim(family, config, head_dim),
        rope=rope,
        local_rope=local_rope,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=read_dtype(config),
        quantization=_quantization(family, config),
        eos_token_ids=_eos_token_ids(config, generation),
        bos_token_id=_bos_token_id(config),
        **traits,
    )


def _quantization(family: Family, config: Config) -> StoredQuantization | None:
    """How the matrices are quantized; None: they are not, or in the family's own way."""
    stated = config.get("quantization_config")
    if not stated or stated.get("quant_method") in family.quantizations:
        return None
    return read_quantization(stated)


def refuse_quantized(config: Config) -> None:
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"the checkpoint is quantized ({method}), which is not supported for this architecture; use the original "
            "model"
        )


def _refuse_ignored(family: Family, config: Config) -> None:
    for key in ("hidden_act", "hidden_activation"):
        if config.get(key) is not None and config[key] not in family.activations:
            supported = ", ".join(family.activations)
            raise UnsupportedModelError(
                f"{key} {config[key]!r} is not supported for {family.name} (supported: {supported})"
            )
    if config.get("is_encoder_decoder") or config.get("is_causal") is False:
        raise UnsupportedModelError("only causal decoders are supported; the config says that this model is not one")
    implied = {key for key, value in family.implies.items() if config.get(key) == value}
    repeated = {key for key, other in _REPEATED.items() if key in config and config[key] == config.get(other)}
    refuse_unread(config, _READ_OR_HARMLESS | family.reads | implied | repeated, where="config.json")


def refuse_unread(config: Config, known: frozenset[str], *, where: str) -> None:
    for key, value in config.items():
        is_set = not (value is None or value is False or value in ([], {}, "", 0))
        if is_set and key not in known and _TOUCHES_COMPUTATION.search(key.lower()):
            raise UnsupportedModelError(
                f"{where} sets {key}={value!r}, which Headrace does not know and would ignore, giving wrong answers"
            )


def _ropes(family: Family, config: Config) -> tuple[RopeSpec, RopeSpec | None]:
    """Returns the rope of all layers, or of layers with full attention, and the rope of layers with a window."""
    if not family.has_rope:
        return RopeSpec(kind="none"), None
    own_keys = family.rope_keys | (_MROPE_KEYS if family.has_mrope else frozenset())
    if own_keys:
        config = {**config, **{key: _plain_rope(config, key, own_keys) for key in ("rope_parameters", "rope_scaling")}}
    if not family.has_local_rope:
        return read_rope(config), None
    by_kind = _rope_object(config, "rope_parameters") or {"full_attention": config.get("rope_scaling")}
    if not by_kind.keys() <= {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(
            f"rope_parameters must be given for full_attention and sliding_attention layers, got {by_kind}"
        )
    wide = {**config, "rope_scaling": None, "rope_parameters": by_kind.get("full_attention")}
    local = {
        "max_position_embeddings": config.get("max_position_embeddings"),
        "rope_theta": config.get("rope_local_base_freq", config.get("rope_theta")),
        "rope_parameters": by_kind.get("sliding_attention"),
    }
    return read_rope(wide), read_rope(local)


def _plain_rope(config: Config, key: str, own_keys: frozenset[str]) -> Mapping[str, Any]:
    values = {name: value for name, value in _rope_object(config, key).items() if name not in own_keys}
    is_mrope = "mrope_section" in own_keys
    return {name: "default" if is_mrope and value == "mrope" else value for name, value in values.items()}


def read_rope(config: Config) -> RopeSpec:
    """Reads `rope_parameters`, or the older pair of `rope_theta` and `rope_scaling`."""
    values = _rope_object(config, "rope_parameters") or _rope_object(config, "rope_scaling")
    kind = values.get("rope_type", values.get("type", "default"))
    if "long_factor" in values:
        kind = "longrope"  # early Phi-3 configs call it su or yarn
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        supported = ", ".join(_ROPE_KEYS)
        raise UnsupportedModelError(f"rope type {kind!r} is not supported (supported: {supported})")
    _refuse_unread_rope(kind, values)
    theta = _theta(values.get("rope_theta", config.get("rope_theta")))
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(theta=theta, kind="linear", factor=_rope_number(kind, values, "factor"))
    original = config.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
    original_max_len = int(original or positive(config, "max_position_embeddings"))
    if kind == "longrope":
        return _longrope(config, values, theta, original_max_len)
    factor = _rope_number(kind, values, "factor")
    if kind == "dynamic":
        stated = positive(config, "max_position_embeddings")
        return RopeSpec(theta=theta, kind="dynamic", factor=factor, original_max_len=stated)
    if kind == "llama3":
        return RopeSpec(
            theta=theta,
            kind="llama3",
            factor=factor,
            original_max_len=original_max_len,
            low_freq_factor=_rope_number(kind, values, "low_freq_factor"),
            high_freq_factor=_rope_number(kind, values, "high_freq_factor"),
        )
    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_len=original_max_len,
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        truncate=bool(values.get("truncate", True)),
        attention_factor=_yarn_attention_factor(values, factor),
    )


def _rope_object(config: Config, key: str) -> Mapping[str, Any]:
    values = config.get(key) or {}
    if not isinstance(values, Mapping):
        raise ModelError(f"{key} must be an object, got {values!r}; check the model's config")
    return values


def _theta(value: Any) -> float:
    if value is None:
        return 10_000.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 < value < math.inf:
        raise ModelError(f"rope_theta must be a number above 1, got {value!r}; check the model's config")
    return float(value)


def _refuse_unread_rope(kind: RopeKind, values: Mapping[str, Any]) -> None:
    harmless = {"rope_type", "type", "rope_theta", "original_max_position_embeddings", "partial_rotary_factor"}
    for key, value in values.items():
        if value is not None and key not in harmless | _ROPE_KEYS[kind]:
            raise UnsupportedModelError(f"rope parameter {key}={value!r} is not supported with rope type {kind!r}")


def _rope_number(kind: str, values: Mapping[str, Any], key: str) -> float:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ModelError(f"rope type {kind!r} needs a positive {key}, got {value!r}; check the model's config")
    return float(value)


def _longrope(config: Config, values: Mapping[str, Any], theta: float, original_max_len: int) -> RopeSpec:
    factor = values.get("factor") or positive(config, "max_position_embeddings") / original_max_len
    attention_factor = values.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_max_len))
    return RopeSpec(
        theta=theta,
        kind="longrope",
        original_max_len=original_max_len,
        attention_factor=float(attention_factor),
        short_divisors=_rope_divisors(values, "short_factor"),
        long_divisors=_rope_divisors(values, "long_factor"),
    )


def _rope_divisors(values: Mapping[str, Any], key: str) -> tuple[float, ...]:
    divisors = values.get(key)
    if not isinstance(divisors, list) or not all(isinstance(value, (int, float)) and value > 0 for value in divisors):
        raise ModelError(f"rope type 'longrope' needs a list of positive numbers {key}, got {divisors!r}")
    return tuple(float(value) for value in divisors)


def _rotary_dim(family: Family, config: Config, head_dim: int) -> int | None:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    factor = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if config.get("rotary_dim") is not None:
        share = positive(config, "rotary_dim") / head_dim
        if factor is not None and int(head_dim * factor + 1e-6) != config["rotary_dim"]:
            raise ModelError(f"rotary_dim {config['rotary_dim']} and partial_rotary_factor {factor} disagree")
        factor = share
    if factor in (None, 1.0):
        return None
    if "partial_rotary_factor" not in family.reads:
        raise UnsupportedModelError(
            f"partial_rotary_factor {factor} is not supported for {family.name}, only 1.0 (whole heads rotate)"
        )
    rotary_dim = int(head_dim * factor + 1e-6)  # a ratio of two integers may be slightly too small
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelError(f"{factor} of a head of {head_dim} must be a positive even number of dimensions that rotate")
    return rotary_dim


def _yarn_attention_factor(values: Mapping[str, Any], factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])
    if values.get("mscale") and values.get("mscale_all_dim"):
        return magnitude(values["mscale"]) / magnitude(values["mscale_all_dim"])
    return magnitude(1.0) * float(values.get("attn_factor") or 1.0)


def _max_model_len(family: Family, config: Config, rope: RopeSpec) -> int:
    """Returns the full context. Configs with linear, dynamic and yarn mostly state it before scaling, others after."""
    stated = positive(config, "max_position_embeddings")
    if rope.kind in ("linear", "dynamic") and not family.states_stretched_len:
        return int(stated * rope.factor)
    if rope.kind == "yarn":
        return max(stated, int(rope.original_max_len * rope.factor))
    return stated


def _intermediate_size(family: Family, config: Config) -> int:
    if family.widens_by is not None and config.get("intermediate_size") is None:
        return family.widens_by * positive(config, "hidden_size")
    return positive(config, "intermediate_size")


def _checked_windows(windows: Windows) -> Windows:
    for window in windows:
        if window is not None and (not isinstance(window, int) or window < 1):
            raise ModelError(f"sliding_window must be a positive integer, got {window!r}; check the model's config")
    return windows


def _useful_windows(windows: Windows, max_model_len: int) -> Windows:
    """Drops windows that no context can exceed: kernels without a window are faster."""
    return tuple(None if window is None or window >= max_model_len else window for window in windows)


def _check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if num_heads % num_kv_heads:
        raise ModelError(f"{num_heads} query heads cannot be shared evenly among {num_kv_heads} key-value heads")
    if head_dim < 2 or head_dim % 2:
        raise ModelError(f"head_dim must be even for the rotary embedding, got {head_dim}")


def positive(config: Config, key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"the model's config needs a positive integer {key}, got {value!r}")
    return value


def read_dtype(config: Config) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return str(name).removeprefix("torch.")


def _eos_token_ids(config: Config, generation: Config) -> tuple[int, ...]:
    ids: dict[int, None] = {}  # an ordered set
    for value in (config.get("eos_token_id"), generation.get("eos_token_id")):
        ids |= dict.fromkeys(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(int(token) for token in ids)


def _bos_token_id(config: Config) -> int | None:
    value = config.get("bos_token_id")
    return value if isinstance(value, int) else None
