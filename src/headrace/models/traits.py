"""What sets each family apart, read from its config: the `traits` of its row."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace.errors import ModelError, UnsupportedModelError
from headrace.models.family import Config, Traits, Windows
from headrace.models.spec import Activation


def llama(config: Config) -> Traits:
    biased = bool(config.get("attention_bias"))
    return {"qkv_bias": biased, "output_bias": biased, "mlp_bias": bool(config.get("mlp_bias"))}


def mistral(config: Config) -> Traits:
    return {"windows": (config["sliding_window"],) * config["num_hidden_layers"]}


def ministral(config: Config) -> Traits:
    kinds = config.get("layer_types")
    if kinds is None:
        return mistral(config)
    return {"windows": _windows_of_kinds(kinds, config["sliding_window"], config["num_hidden_layers"])}


def qwen2(config: Config) -> Traits:
    return {"qkv_bias": True, "windows": _windows_by_layer(config)}


def qwen3(config: Config) -> Traits:
    biased = bool(config.get("attention_bias"))
    return {"qkv_bias": biased, "output_bias": biased, "qk_norm": True, "windows": _windows_by_layer(config)}


def smollm3(config: Config) -> Traits:
    """`no_rope_layers` has a zero for each layer whose heads do not rotate."""
    num_layers, flags = config["num_hidden_layers"], config.get("no_rope_layers")
    if flags is None:
        period = config["no_rope_layer_interval"]
        flags = [(index + 1) % period for index in range(num_layers)]
    if len(flags) < num_layers:
        raise ModelError(f"no_rope_layers must have a number for each of {num_layers} layers, got {flags}")
    ropeless = tuple(index for index in range(num_layers) if not flags[index])
    windows: Windows = (None,) * num_layers
    if config.get("use_sliding_window"):
        default = ["full_attention" if flags[index] else "sliding_attention" for index in range(num_layers)]
        windows = _windows_of_kinds(config.get("layer_types") or default, config.get("sliding_window"), num_layers)
    return llama(config) | {"ropeless_layers": ropeless, "windows": windows}


def seed_oss(config: Config) -> Traits:
    return {
        "qkv_bias": bool(config["attention_bias"]),
        "output_bias": bool(config.get("attention_out_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
    }


def ernie4_5(config: Config) -> Traits:
    biased = bool(config.get("use_bias"))
    return {"qkv_bias": biased, "output_bias": biased, "mlp_bias": biased, "rotates_pairs": True}


def exaone4(config: Config) -> Traits:
    """In models with windows, layers that see everything do not rotate."""
    traits: Traits = {"qk_norm": True, "pre_norms": False, "post_norms": True}
    return traits if config["sliding_window"] is None else traits | _only_windows_rotate(config)


def _only_windows_rotate(config: Config) -> Traits:
    windows = _windows_by_pattern(config)
    return {"windows": windows, "ropeless_layers": tuple(i for i, window in enumerate(windows) if window is None)}


def granite(config: Config) -> Traits:
    """What attention and MLP write is multiplied before it joins the residual stream. Here the stream is divided
    instead: only norms read it, and give the same when their epsilon is divided too, by the square.
    """
    multiplier = _number(config, "residual_multiplier")
    return llama(config) | {
        "embedding_scale": _number(config, "embedding_multiplier") / multiplier,
        "norm_eps": _number(config, "rms_norm_eps") / multiplier**2,
        "attention_scale": _number(config, "attention_multiplier"),
        "logit_scale": 1.0 / _number(config, "logits_scaling"),
    }


def olmo2(config: Config) -> Traits:
    biased = bool(config.get("attention_bias"))
    return {
        "qkv_bias": biased,
        "output_bias": biased,
        "wide_qk_norm": True,
        "pre_norms": False,
        "post_norms": True,
    }


def olmo3(config: Config) -> Traits:
    """Every fourth layer sees all, the others a window, unless `layer_types` says otherwise."""
    return olmo2(config) | {"windows": _windows_by_pattern(config)}


def glm(config: Config) -> Traits:
    return {"qkv_bias": bool(config["attention_bias"]), "rotates_pairs": True}


def glm4(config: Config) -> Traits:
    return glm(config) | {"post_norms": True}


def starcoder2(config: Config) -> Traits:
    if config["norm_type"] != "layer_norm":
        raise UnsupportedModelError(f"norm_type {config['norm_type']!r} is not supported, only layer_norm")
    biased = bool(config["use_bias"])
    return mistral(config) | {
        "qkv_bias": biased,
        "output_bias": biased,
        "mlp_bias": biased,
        "layer_norm": True,
        "norm_bias": True,
        "is_gated": False,
        "activation": "gelu_tanh",
    }


def gpt_neox(config: Config) -> Traits:
    biased = bool(config["attention_bias"])
    return {
        "qkv_bias": biased,
        "output_bias": biased,
        "mlp_bias": True,
        "layer_norm": True,
        "norm_bias": True,
        "is_parallel": bool(config["use_parallel_residual"]),
        "is_gated": False,
        "activation": _plain_activation(config),
    }


def gpt2(config: Config) -> Traits:
    traits: Traits = {
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "layer_norm": True,
        "norm_bias": True,
        "is_gated": False,
        "activation": _plain_activation(config),
        "num_positions": config["max_position_embeddings"],
    }
    return traits if config["scale_attn_weights"] else traits | {"attention_scale": 1.0}


def _plain_activation(config: Config) -> Activation:
    """Three names stand for the one with the tanh."""
    return "gelu" if config["hidden_act"] == "gelu" else "gelu_tanh"


def phi(config: Config) -> Traits:
    return {
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "layer_norm": True,
        "norm_bias": True,
        "is_parallel": True,
        "shares_norm": True,
        "is_gated": False,
        "activation": _plain_activation(config),
    }


def stablelm(config: Config) -> Traits:
    is_parallel = bool(config.get("use_parallel_residual"))
    return {
        "qkv_bias": bool(config.get("use_qkv_bias")),
        "layer_norm": True,
        "norm_bias": True,
        "is_parallel": is_parallel,
        "shares_norm": is_parallel,
    }


def cohere(config: Config) -> Traits:
    biased = bool(config.get("attention_bias"))
    return {
        "qkv_bias": biased,
        "output_bias": biased,
        "layer_norm": True,
        "is_parallel": True,
        "shares_norm": True,
        "rotates_pairs": True,
        "logit_scale": _number(config, "logit_scale"),
    }


def cohere2(config: Config) -> Traits:
    return cohere(config) | _only_windows_rotate(config)


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


def gemma(config: Config) -> Traits:
    biased = bool(config.get("attention_bias"))
    return {
        "qkv_bias": biased,
        "output_bias": biased,
        "norm_offset": 1.0,
        "activation": "gelu_tanh",
        "embedding_scale": math.sqrt(config["hidden_size"]),
        "rounds_embedding_scale": True,
    }


def gemma2(config: Config) -> Traits:
    return gemma(config) | {
        "post_norms": True,
        "attention_scale": 1.0 / math.sqrt(_number(config, "query_pre_attn_scalar")),
        "attention_softcap": _number_or_none(config, "attn_logit_softcapping"),
        "logit_softcap": _number_or_none(config, "final_logit_softcapping"),
        "windows": _windows_by_pattern(config),
    }


def gemma3(config: Config) -> Traits:
    return gemma2(config) | {"qk_norm": True}


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
