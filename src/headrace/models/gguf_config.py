"""GGUF metadata to a ModelSpec, translated into the names that config.json uses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from headrace.errors import ModelError, UnsupportedModelError
from headrace.models.families import family_of_gguf
from headrace.models.family import Family
from headrace.models.hub_config import build_spec, refuse_unread
from headrace.models.spec import ModelSpec, Shape

Metadata = Mapping[str, Any]

_CONTROL_OR_USER_DEFINED = (3, 4)
# End-of-turn tokens that some converters omit from the metadata; without them a chat model does not stop.
_HARMONY_ENDS = ("<|return|>", "<|call|>")  # of gpt-oss, where <|end|> only ends one of several messages
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|eot|>", "<|eom|>")
_YARN_ATTENTION_FACTOR = "rope.scaling.yarn_attn_factor"
# Models, by family and number of layers, whose attention scale uses hidden_size / num_heads instead of head_dim. GGUF
# files do not say so.
_SCALED_BY_SHARE = {("gemma2", 46), ("gemma3_text", 62)}  # the 27B models
_EXPERTS_OF_MAVERICK = 128  # Llama 4 Maverick does not norm queries and keys; GGUF files do not say so either
_READ = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.layer_norm_epsilon",
        "attention.sliding_window",
        "attention.causal",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scale_linear",
    }
)


def spec_from_gguf(
    metadata: Metadata, shapes: Mapping[str, Shape], *, rope_tensors: Mapping[str, tuple[float, ...]], dtype: str
) -> ModelSpec:
    """Builds the spec. `shapes` are the file's tensors under their GGUF names; their presence tells what metadata
    omits."""
    architecture = metadata.get("general.architecture")
    family = family_of_gguf(metadata)
    values = {
        key.removeprefix(f"{architecture}."): value
        for key, value in metadata.items()
        if key.startswith(f"{architecture}.")
    }
    _refuse_ignored(family, values)
    rope = _rope_parameters(values, rope_tensors)
    if rope.get("rope_type") == "yarn":
        rope |= family.gguf_yarn(values)
    config = _as_config(values, metadata, shapes) | _of_family(family, values) | dict(family.gguf_tells(shapes))
    config |= {"rope_scaling": rope, "rope_theta": rope["rope_theta"], "dtype": dtype}
    spec = build_spec(family, config, generation={})
    return dataclasses.replace(
        spec,
        windows=_windows(family, values, spec),
        qkv_bias=_has_any(shapes, "attn_q.bias", "attn_qkv.bias"),
        output_bias=_has_any(shapes, "attn_output.bias"),
        mlp_bias=_has_any(shapes, "ffn_up.bias", "ffn_up_exps.bias"),
        mixture=None if spec.mixture is None else dataclasses.replace(spec.mixture, interleaves=False),
        norm_bias="output_norm.bias" in shapes,
        norm_offset=0.0,  # the converter already added it
        rope=dataclasses.replace(spec.rope, frequency_divisors=rope_tensors.get("rope_freqs", ())),
    )


def _has_any(shapes: Mapping[str, Shape], *names: str) -> bool:
    """Tells whether a layer has one of these tensors: in hybrids only some have attention."""
    return any(name.partition(".")[2].partition(".")[2] in names for name in shapes if name.startswith("blk."))


def _refuse_ignored(family: Family, values: Metadata) -> None:
    set_values = {key: value for key, value in values.items() if value != 0}
    if _is_implied_by_yarn(values):
        del set_values[_YARN_ATTENTION_FACTOR]
    known = _READ | family.gguf_keys.keys() | family.gguf_further.keys() | family.gguf_reads
    refuse_unread(set_values, known, where="the GGUF metadata")
    if values.get("attention.causal") is False:
        raise UnsupportedModelError("only causal decoders are supported; the GGUF metadata says this model is not one")


def _is_implied_by_yarn(values: Metadata) -> bool:
    """Tells whether the attention factor is yarn's usual one. Converters may copy it from the config, although it is
    implied."""
    found, factor = values.get(_YARN_ATTENTION_FACTOR, 0.0), values.get("rope.scaling.factor", 0.0)
    return found != 0 and factor > 0 and math.isclose(found, 0.1 * math.log(factor) + 1, rel_tol=1e-5)


def _as_config(values: Metadata, metadata: Metadata, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    if "token_embd.weight" not in shapes:
        raise ModelError("the GGUF file has no tensor 'token_embd.weight'; it is not a language model, or incomplete")
    num_heads = _same_for_all_layers(values, "attention.head_count")
    head_dim = _head_dim(values, num_heads)
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": values.get("embedding_length"),
        "intermediate_size": _same_for_all_layers(values, "feed_forward_length"),
        "num_hidden_layers": _num_layers(values),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _same_for_all_layers(values, "attention.head_count_kv"),
        "head_dim": head_dim,
        "max_position_embeddings": values.get("context_length"),
        "original_max_position_embeddings": values.get("rope.scaling.original_context_length"),
        "rms_norm_eps": values.get(
            "attention.layer_norm_rms_epsilon", values.get("attention.layer_norm_epsilon", 1e-6)
        ),
        "partial_rotary_factor": _rotary_share(values, head_dim),
        "tie_word_embeddings": "output.weight" not in shapes,
        "eos_token_id": list(_eos_token_ids(metadata)),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
    }


def _num_layers(values: Metadata) -> int | None:
    """Returns the number of layers without those at the end that predict further tokens."""
    count = values.get("block_count")
    return None if count is None else count - values.get("nextn_predict_layers", 0)


def _of_family(family: Family, values: Metadata) -> dict[str, Any]:
    names = {**family.gguf_keys, **family.gguf_further}
    config = {**family.gguf_implies, **{name: values[key] for key, name in names.items() if key in values}}
    config |= family.gguf_computes(values)
    if "num_local_experts" in family.reads:
        _require_counts(family, values)
    if family.name == "llama4_text":
        config["use_qk_norm"] = values["expert_count"] != _EXPERTS_OF_MAVERICK
    if isinstance(config.get("sliding_window_pattern"), list):
        has_window = config.pop("sliding_window_pattern")
        config["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in has_window]
    if config.get("sliding_window") == 0:
        config["sliding_window"] = None
    if "query_pre_attn_scalar" in family.reads:
        num_heads = _same_for_all_layers(values, "attention.head_count")
        width_of = _width_of_share if (family.name, values.get("block_count")) in _SCALED_BY_SHARE else _head_dim
        config["query_pre_attn_scalar"] = width_of(values, num_heads)
    return config


def _require_counts(family: Family, values: Metadata) -> None:
    """Requires keys that no default of config.json may replace."""
    of_experts = [key for key in family.gguf_keys if not key.startswith("attention.")]
    missing = [key for key in of_experts if not values.get(key)]
    if missing:
        raise ModelError(f"the GGUF metadata has no {', '.join(missing)}, which a {family.name} model needs")


def _same_for_all_layers(values: Metadata, key: str) -> int | None:
    """Returns a number that is the same in all layers; it is 0 in those of a hybrid that have no such part."""
    value = values.get(key)
    if not isinstance(value, list):
        return value
    numbers = set(value) - {0}
    if len(numbers) > 1:
        raise UnsupportedModelError(f"{key} differs between layers ({value}), which is not supported")
    return int(numbers.pop()) if numbers else 0


def _head_dim(values: Metadata, num_heads: int | None) -> int | None:
    head_dim = values.get("attention.key_length")
    if head_dim is None:
        head_dim = _width_of_share(values, num_heads)
    key = "attention.value_length"
    if values.get(key, head_dim) != head_dim and "attention.kv_lora_rank" not in values:
        raise UnsupportedModelError(f"{key} is {values[key]}, but only the head size, {head_dim}, is supported")
    return head_dim


def _rotary_share(values: Metadata, head_dim: int | None) -> float:
    count = values.get("rope.dimension_count")
    return count / head_dim if count and head_dim else 1.0


def _width_of_share(values: Metadata, num_heads: int | None) -> int | None:
    return values["embedding_length"] // num_heads if num_heads and "embedding_length" in values else None


def _rope_parameters(values: Metadata, tensors: Mapping[str, tuple[float, ...]]) -> dict[str, Any]:
    kind = values.get("rope.scaling.type", "linear" if "rope.scale_linear" in values else "none")
    parameters: dict[str, Any] = {"rope_theta": values.get("rope.freq_base", 10_000.0)}
    original = {"original_max_position_embeddings": values.get("rope.scaling.original_context_length")}
    if "rope_factors_long" in tensors:
        return parameters | _longrope(values, tensors) | original
    if kind == "none":
        return parameters
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(f"rope scaling {kind!r} in a GGUF file is not supported, only linear and yarn")
    parameters |= {"rope_type": kind, "factor": values.get("rope.scaling.factor", values.get("rope.scale_linear"))}
    if kind == "yarn":
        parameters |= original | {
            "beta_fast": values.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": values.get("rope.scaling.yarn_beta_slow"),
            "mscale_all_dim": 10 * values.get("rope.scaling.yarn_log_multiplier", 0.0),  # of DeepSeek
        }
    return parameters


def _longrope(values: Metadata, tensors: Mapping[str, tuple[float, ...]]) -> dict[str, Any]:
    """Builds longrope's parameters. Only the presence of its two tensors tells that a file uses it."""
    return {
        "rope_type": "longrope",
        "long_factor": list(tensors["rope_factors_long"]),
        "short_factor": list(tensors.get("rope_factors_short", ())),
        "attention_factor": values.get("rope.scaling.attn_factor"),
    }


def _windows(family: Family, values: Metadata, spec: ModelSpec) -> tuple[int | None, ...]:
    window = values.get("attention.sliding_window") or None
    if window is None or window >= spec.max_model_len or "attention.sliding_window" in family.gguf_keys:
        return spec.windows
    if family.name not in ("llama", "mixtral"):
        raise UnsupportedModelError(f"a sliding window ({window}) in a {family.name} GGUF file is not supported")
    return (window,) * spec.num_layers


def _eos_token_ids(metadata: Metadata) -> tuple[int, ...]:
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = dict.fromkeys(int(token) for token in named if token is not None)
    tokens, types = metadata.get("tokenizer.ggml.tokens") or [], metadata.get("tokenizer.ggml.token_type") or []
    control = {tokens[index]: index for index, kind in enumerate(types) if kind in _CONTROL_OR_USER_DEFINED}
    ends = _HARMONY_ENDS if _HARMONY_ENDS[0] in control else _TURN_ENDS
    ids |= dict.fromkeys(control[text] for text in ends if text in control)
    return tuple(ids)
