"""What distinguishes families with a mixture of experts: the `traits` of their rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace.errors import ModelError, UnsupportedModelError
from headrace.models import traits
from headrace.models.family import Config, Traits, Windows
from headrace.models.spec import LatentSpec, Routing
from headrace.models.traits import count, mixture, windows_of_kinds


def _softmax(config: Config) -> Routing:
    return "softmax_of_chosen" if config["norm_topk_prob"] else "softmax"


def qwen2_moe(config: Config) -> Traits:
    """A shared expert with a gate. With sliding windows on, every other of the first layers has one, unless
    `layer_types` says otherwise."""
    num_layers, window = config["num_hidden_layers"], config["sliding_window"]
    windows: Windows = (None,) * num_layers
    if config["use_sliding_window"]:
        last = config["max_window_layers"]
        default = ["sliding_attention" if i % 2 == 0 and i < last else "full_attention" for i in range(num_layers)]
        windows = windows_of_kinds(config.get("layer_types") or default, window, num_layers)
    common: Traits = {"qkv_bias": bool(config["qkv_bias"]), "windows": windows}
    return common | mixture(
        config,
        traits.sparse_layers(config),
        _softmax(config),
        expert_size=count(config, "moe_intermediate_size"),
        shared_size=count(config, "shared_expert_intermediate_size"),
        gates_shared=True,
    )


def olmoe(config: Config) -> Traits:
    biased = bool(config.get("attention_bias"))
    common: Traits = {
        "qkv_bias": biased,
        "output_bias": biased,
        "wide_qk_norm": True,
        "clip_qkv": traits.number_or_none(config, "clip_qkv"),
    }
    layers, size = range(config["num_hidden_layers"]), count(config, "intermediate_size")
    return common | mixture(config, layers, _softmax(config), expert_size=size)


def phimoe(config: Config) -> Traits:
    biased = bool(config.get("attention_bias"))
    common: Traits = {
        "qkv_bias": biased,
        "output_bias": biased,
        "head_bias": bool(config.get("lm_head_bias")),
        "layer_norm": True,
        "norm_bias": True,
    }
    if config["num_experts_per_tok"] != 2:
        raise UnsupportedModelError(f"Phi-MoE routes to 2 experts, not to {config['num_experts_per_tok']}")
    layers, size = range(config["num_hidden_layers"]), count(config, "intermediate_size")
    jitter = traits.number(config, "router_jitter_noise")
    return traits.mistral(config) | common | mixture(config, layers, "sparsemixer", expert_size=size, jitter=jitter)


def ernie4_5_moe(config: Config) -> Traits:
    if config.get("use_bias"):
        raise UnsupportedModelError("ERNIE 4.5 models with biases in their experts are not supported")
    num_layers, period = config["num_hidden_layers"], count(config, "moe_layer_interval")
    end = config["moe_layer_end_index"]
    span = range(config["moe_layer_start_index"], num_layers if end == -1 else end + 1)
    size = count(config, "moe_intermediate_size")
    return traits.ernie4_5(config) | mixture(
        config,
        [index for index in span if (index + 1) % period == 0],
        "softmax_of_chosen",
        expert_size=size,
        shared_size=size * config["moe_num_shared_experts"] or None,
        corrects_choice=True,
    )


def granite_moe(config: Config) -> Traits:
    return traits.granite(config) | mixture(
        config,
        range(config["num_hidden_layers"]),
        "softmax_of_chosen",
        expert_size=count(config, "intermediate_size"),
        shared_size=config.get("shared_intermediate_size") or None,
    )


def glm4_moe(config: Config) -> Traits:
    """The bias of attention is of queries, keys and values. Halves of a part of each head rotate."""
    common: Traits = {"qkv_bias": bool(config.get("attention_bias")), "qk_norm": bool(config.get("use_qk_norm"))}
    return common | _deepseek_mixture(config)


def dots1(config: Config) -> Traits:
    biased, num_layers = bool(config.get("attention_bias")), config["num_hidden_layers"]
    window, first = config.get("sliding_window"), config["max_window_layers"]
    windows: Windows = tuple(window if index >= first else None for index in range(num_layers))
    if config.get("layer_types"):
        windows = windows_of_kinds(config["layer_types"], window, num_layers)
    common: Traits = {"qkv_bias": biased, "output_bias": biased, "qk_norm": True, "windows": windows}
    return common | _deepseek_mixture(config)


def _deepseek_mixture(config: Config) -> Traits:
    """Experts are chosen by corrected scores after the first dense layers, together with shared experts."""
    shared_size = count(config, "moe_intermediate_size") * (config.get("n_shared_experts") or 0) or None
    layers = range(config["first_k_dense_replace"], config["num_hidden_layers"])
    return deepseek_mixture(config, layers, shared_size=shared_size)


def deepseek_mixture(config: Config, layers: Sequence[int], *, shared_size: int | None) -> Traits:
    """Experts chosen by the sigmoid of their logits plus a correction, in groups."""
    num_groups, num_groups_chosen = _groups(config)
    return mixture(
        config,
        layers,
        "sigmoid_of_chosen" if config["norm_topk_prob"] else "sigmoid",
        expert_size=count(config, "moe_intermediate_size"),
        shared_size=shared_size,
        corrects_choice=True,
        scale=traits.number(config, "routed_scaling_factor"),
        num_groups=num_groups,
        num_groups_chosen=num_groups_chosen,
    )


def _groups(config: Config) -> tuple[int, int]:
    """Returns the number of groups of experts, and from how many of them those of a token are."""
    num_groups, num_chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    num_experts = count(config, "num_local_experts")
    if num_experts % num_groups or num_chosen > num_groups:
        raise ModelError(f"{num_experts} experts cannot be chosen from {num_chosen} of {num_groups} equal groups")
    return num_groups, num_chosen


def deepseek_v2(config: Config) -> Traits:
    if config["topk_method"] not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModelError(f"topk_method {config['topk_method']!r} is not supported for DeepSeek V2")
    size = count(config, "moe_intermediate_size")
    num_groups, num_groups_chosen = _groups(config) if config["topk_method"] == "group_limited_greedy" else (1, 1)
    return _latent_attention(config) | mixture(
        config,
        range(config["first_k_dense_replace"], config["num_hidden_layers"]),
        "softmax",
        expert_size=size,
        shared_size=size * (config.get("n_shared_experts") or 0) or None,
        scale=traits.number(config, "routed_scaling_factor"),
        num_groups=num_groups,
        num_groups_chosen=num_groups_chosen,
    )


def deepseek_v3(config: Config) -> Traits:
    return _latent_attention(config) | _deepseek_mixture(config)


def _latent_attention(config: Config) -> Traits:
    keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    kv_rank, still_dim, rotary_dim, value_dim = (count(config, key) for key in keys)
    head_dim = still_dim + rotary_dim
    if rotary_dim % 2:
        raise ModelError(f"qk_rope_head_dim must be even, got {rotary_dim}; check the model's config")
    query_rank = None if config.get("q_lora_rank") is None else count(config, "q_lora_rank")
    return {
        "latent": LatentSpec(query_rank, kv_rank, still_dim, rotary_dim, value_dim),
        "rotates_pairs": bool(config["rope_interleave"]),
        "attention_scale": head_dim**-0.5 * _yarn_magnitude(config) ** 2,
    }


def _yarn_magnitude(config: Config) -> float:
    """Returns the factor that yarn's `mscale_all_dim` gives both queries and keys."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    weight, factor = rope.get("mscale_all_dim") or 0.0, rope.get("factor") or 1.0
    return float(0.1 * weight * math.log(factor) + 1.0) if factor > 1 else 1.0


def gpt_oss(config: Config) -> Traits:
    if (config["swiglu_limit"], config["swiglu_alpha"]) != (7.0, 1.702):
        raise UnsupportedModelError(
            f"swiglu_limit {config['swiglu_limit']} with swiglu_alpha {config['swiglu_alpha']} is not supported, "
            "only 7.0 with 1.702"
        )
    biased, num_layers = bool(config["attention_bias"]), config["num_hidden_layers"]
    default = ["full_attention" if index % 2 else "sliding_attention" for index in range(num_layers)]
    windows = windows_of_kinds(config.get("layer_types") or default, config["sliding_window"], num_layers)
    common: Traits = {
        "qkv_bias": biased,
        "output_bias": biased,
        "mlp_bias": True,
        "has_sinks": True,
        "activation": "clamped_silu",
        "windows": windows,
    }
    return common | mixture(
        config,
        range(num_layers),
        "softmax_of_chosen",
        expert_size=count(config, "intermediate_size"),
        router_bias=True,
        interleaves=True,
    )


def minimax_m2(config: Config) -> Traits:
    if not set(config.get("attn_type_list") or ()) <= {1}:
        raise UnsupportedModelError("MiniMax models with linear attention in some layers are not supported")
    common: Traits = {"wide_qk_norm": True}
    layers, size = range(config["num_hidden_layers"]), count(config, "intermediate_size")
    return common | mixture(config, layers, "sigmoid_of_chosen", expert_size=size, corrects_choice=True)
