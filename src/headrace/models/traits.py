"""What distinguishes each family, read from its config: the `traits` of its row."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace.errors import ModelError, UnsupportedModelError
from headrace.models.family import Config, Traits, Windows
from headrace.models.spec import Gemma3nSpec, MixtureSpec, QueryGrowth, Routing


def llama(config: Config) -> Traits:
    biased = bool(config.get("attention_bias"))
    return {"qkv_bias": biased, "output_bias": biased, "mlp_bias": bool(config.get("mlp_bias"))}


def mistral(config: Config) -> Traits:
    return {"windows": (config["sliding_window"],) * config["num_hidden_layers"]}


def ministral(config: Config) -> Traits:
    kinds = config.get("layer_types")
    if kinds is None:
        return mistral(config)
    return {"windows": windows_of_kinds(kinds, config["sliding_window"], config["num_hidden_layers"])}


def ministral3(config: Config) -> Traits:
    """Mistral; Ministral 3 also scales queries with their position."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not parameters.get("llama_4_scaling_beta"):
        return mistral(config)
    step, strength = (number(parameters, key) for key in ("original_max_position_embeddings", "llama_4_scaling_beta"))
    growth: Traits = {"query_growth": QueryGrowth(step, strength, offset=0, rotated_layers=True)}
    return mistral(config) | growth


def qwen2(config: Config) -> Traits:
    return {"qkv_bias": True, "windows": _windows_by_layer(config)}


def qwen3(config: Config) -> Traits:
    biased = bool(config.get("attention_bias"))
    return {"qkv_bias": biased, "output_bias": biased, "qk_norm": True, "windows": _windows_by_layer(config)}


def smollm3(config: Config) -> Traits:
    num_layers, ropeless = config["num_hidden_layers"], _ropeless_layers(config, config.get("no_rope_layers"))
    windows: Windows = (None,) * num_layers
    if config.get("use_sliding_window"):
        default = ["sliding_attention" if index in ropeless else "full_attention" for index in range(num_layers)]
        windows = windows_of_kinds(config.get("layer_types") or default, config.get("sliding_window"), num_layers)
    return llama(config) | {"ropeless_layers": ropeless, "windows": windows}


def _ropeless_layers(config: Config, flags: Sequence[int] | None) -> tuple[int, ...]:
    """Returns the layers whose heads do not rotate: a zero in the flags (`no_rope_layers`), or every n-th layer."""
    num_layers = config["num_hidden_layers"]
    if flags is None:
        period = count(config, "no_rope_layer_interval")
        flags = [(index + 1) % period for index in range(num_layers)]
    if len(flags) < num_layers:
        raise ModelError(f"no_rope_layers must have a number for each of {num_layers} layers, got {flags}")
    return tuple(index for index in range(num_layers) if not flags[index])


def llama4(config: Config) -> Traits:
    """Layers that rotate have chunked attention, the others full attention, unless `layer_types` says otherwise.

    Queries and keys are normed after the rotation, which must keep their lengths.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise UnsupportedModelError(f"rope type {kind!r} is not supported for Llama 4, only llama3, linear and default")
    num_layers, biased = config["num_hidden_layers"], bool(config.get("attention_bias"))
    ropeless = _ropeless_layers(config, config.get("no_rope_layers") or None)
    default = ["full_attention" if index in ropeless else "chunked_attention" for index in range(num_layers)]
    chunk = None if config["attention_chunk_size"] is None else count(config, "attention_chunk_size")
    traits: Traits = {
        "qkv_bias": biased,
        "output_bias": biased,
        "rotates_pairs": True,
        "ropeless_layers": ropeless,
        "bare_qk_norm": bool(config["use_qk_norm"]),
        "windows": windows_of_kinds(config.get("layer_types") or default, chunk, num_layers, name="chunked_attention"),
        "windows_slide": False,
    }
    if config["attn_temperature_tuning"]:
        traits["query_growth"] = QueryGrowth(number(config, "floor_scale"), number(config, "attn_scale"))
    layers = config.get("moe_layers")
    if layers is None:
        period = count(config, "interleave_moe_layer_step")
        layers = range(period - 1, num_layers, period)
    size = count(config, "moe_intermediate_size")
    return traits | mixture(config, layers, "sigmoid", expert_size=size, weighs_input=True, shared_size=size)


def mixtral(config: Config) -> Traits:
    size, layers = count(config, "intermediate_size"), range(config["num_hidden_layers"])
    return mistral(config) | mixture(config, layers, "softmax_of_chosen", expert_size=size)


def qwen3_moe(config: Config) -> Traits:
    """A window applies to all layers."""
    num_layers, layers = config["num_hidden_layers"], sparse_layers(config)
    routing: Routing = "softmax_of_chosen" if config["norm_topk_prob"] else "softmax"
    window = config["sliding_window"] if config["use_sliding_window"] else None
    traits = qwen3(config)
    traits["windows"] = (window,) * num_layers
    return traits | mixture(config, layers, routing, expert_size=count(config, "moe_intermediate_size"))


def sparse_layers(config: Config) -> list[int]:
    """Qwen's rule: layers are dense by name, or all but every n-th."""
    dense, period = config.get("mlp_only_layers") or (), count(config, "decoder_sparse_step")
    return [index for index in range(config["num_hidden_layers"]) if index not in dense and (index + 1) % period == 0]


def mixture(
    config: Config,
    layers: Sequence[int],
    routing: Routing,
    *,
    expert_size: int,
    weighs_input: bool = False,
    shared_size: int | None = None,
    gates_shared: bool = False,
    corrects_choice: bool = False,
    scale: float = 1.0,
    jitter: float = 0.0,
    router_bias: bool = False,
    interleaves: bool = False,
    num_groups: int = 1,
    num_groups_chosen: int = 1,
) -> Traits:
    num_layers = config["num_hidden_layers"]
    if not set(layers) <= set(range(num_layers)):
        raise ModelError(f"the layers with experts, {list(layers)}, must be among the model's {num_layers}")
    num_experts, num_chosen = count(config, "num_local_experts"), count(config, "num_experts_per_tok")
    if num_chosen > num_experts:
        raise ModelError(f"num_experts_per_tok is {num_chosen}, but there are {num_experts} experts")
    if not layers:
        return {}
    return {
        "mixture": MixtureSpec(
            tuple(layers),
            num_experts,
            num_chosen,
            expert_size,
            routing,
            weighs_input=weighs_input,
            shared_size=shared_size,
            gates_shared=gates_shared,
            corrects_choice=corrects_choice,
            scale=scale,
            jitter=jitter,
            router_bias=router_bias,
            interleaves=interleaves,
            num_groups=num_groups,
            num_groups_chosen=num_groups_chosen,
        )
    }


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
    """EXAONE 4: in models with windows, layers with full attention do not rotate."""
    traits: Traits = {"qk_norm": True, "pre_norms": False, "post_norms": True}
    return traits if config["sliding_window"] is None else traits | _only_windows_rotate(config)


def _only_windows_rotate(config: Config) -> Traits:
    windows = _windows_by_pattern(config)
    return {"windows": windows, "ropeless_layers": tuple(i for i, window in enumerate(windows) if window is None)}


def granite(config: Config) -> Traits:
    """Scales what attention and MLP add to the residual stream. Here the stream is divided instead: only norms read
    it, and they give the same result when their epsilon is divided by the square."""
    multiplier = number(config, "residual_multiplier")
    return llama(config) | {
        "embedding_scale": number(config, "embedding_multiplier") / multiplier,
        "norm_eps": number(config, "rms_norm_eps") / multiplier**2,
        "attention_scale": number(config, "attention_multiplier"),
        "logit_scale": 1.0 / number(config, "logits_scaling"),
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
    """Every fourth layer has full attention, the others a window, unless `layer_types` says otherwise."""
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


def stablelm(config: Config) -> Traits:
    is_parallel = bool(config.get("use_parallel_residual"))
    return {
        "qkv_bias": bool(config.get("use_qkv_bias")),
        "head_qk_norm": bool(config.get("qk_layernorm")),
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
        "head_qk_norm": bool(config.get("use_qk_norm")),
        "logit_scale": number(config, "logit_scale"),
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
    return windows_of_kinds(kinds, window, num_layers)


def windows_of_kinds(
    kinds: Sequence[str], window: int | None, num_layers: int, *, name: str = "sliding_attention"
) -> Windows:
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", name}:
        raise UnsupportedModelError(
            f"layer_types must name full_attention or {name} for each of {num_layers} layers, got {kinds}"
        )
    if window is None and name in kinds:
        raise UnsupportedModelError(f"some layers are of {name}, but the config does not say how much these see")
    return tuple(window if kind == name else None for kind in kinds)


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
        "attention_scale": 1.0 / math.sqrt(number(config, "query_pre_attn_scalar")),
        "attention_softcap": number_or_none(config, "attn_logit_softcapping"),
        "logit_softcap": number_or_none(config, "final_logit_softcapping"),
        "windows": _windows_by_pattern(config),
    }


def gemma3(config: Config) -> Traits:
    return gemma2(config) | {"qk_norm": True}


def gemma3n(config: Config) -> Traits:
    """Norms have no offset, and scores are not scaled: `query_pre_attn_scalar` has no effect."""
    if config["altup_active_idx"] != 0:
        raise UnsupportedModelError(f"altup_active_idx {config['altup_active_idx']} is not supported, only 0")
    num_layers, num_shared = config["num_hidden_layers"], config.get("num_kv_shared_layers") or 0
    windows, sparsities = _windows_by_pattern(config), config.get("activation_sparsity_pattern") or 0.0
    sparsities = [sparsities] * num_layers if isinstance(sparsities, float) else sparsities
    if len(sparsities) != num_layers or not all(0.0 <= each < 1.0 for each in sparsities):
        raise ModelError(f"activation_sparsity_pattern must have a share for each of {num_layers} layers")
    if not set(windows[num_layers - num_shared :]) <= set(windows[: num_layers - num_shared]):
        raise ModelError(f"the last {num_shared} layers must share the keys of earlier layers with the same window")
    return gemma2({**config, "query_pre_attn_scalar": 1.0}) | {
        "qk_norm": True,
        "norm_offset": 0.0,
        "windows": windows,
        "gemma3n": Gemma3nSpec(
            num_streams=count(config, "altup_num_inputs"),
            scales_corrected=bool(config["altup_correct_scale"]),
            input_size=count(config, "hidden_size_per_layer_input"),
            input_vocab_size=count(config, "vocab_size_per_layer_input"),
            low_rank=count(config, "laurel_rank"),
            num_shared_layers=num_shared,
            sparsities=tuple(float(each) for each in sparsities),
        ),
    }


def _windows_by_pattern(config: Config) -> Windows:
    """Gemma's rule: `layer_types` names the layers, or else every n-th has full attention, the others a window."""
    num_layers, kinds = config["num_hidden_layers"], config.get("layer_types")
    if kinds is None:
        period = config.get("_sliding_window_pattern") or config.get("sliding_window_pattern")
        if not isinstance(period, int) or period < 1:
            raise ModelError(f"sliding_window_pattern must be a positive integer, got {period!r}")
        kinds = ["sliding_attention" if (index + 1) % period else "full_attention" for index in range(num_layers)]
    return windows_of_kinds(kinds, config["sliding_window"], num_layers)


def number_or_none(config: Config, key: str) -> float | None:
    return None if config.get(key) is None else number(config, key)


def count(config: Config, key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"the model's config needs a positive integer {key}, got {value!r}")
    return value


def number(config: Config, key: str) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ModelError(f"the model's config needs a positive number {key}, got {value!r}")
    return float(value)
