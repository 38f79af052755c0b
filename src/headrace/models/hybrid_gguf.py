"""What GGUF files of hybrids say about their recurrent layers, under the names of config.json."""

from __future__ import annotations

from collections.abc import Collection

from headrace.models.family import Config

_UNSTATED_CONTEXT = 1 << 20  # converters write it where a config states no context
_KINDS_BY_TENSOR = {"ssm_in.weight": "mamba", "attn_q.weight": "attention", "ffn_gate_inp.weight": "moe"}


def _ratio(values: Config, key: str, other: str) -> int | None:
    """One number of the metadata divided by another; None if one of them is not there."""
    first, second = values.get(key), values.get(other)
    return first // second if first and second else None


def mamba_sizes(values: Config) -> Config:
    return {
        "mamba_num_heads": values.get("ssm.time_step_rank"),
        "mamba_head_dim": _ratio(values, "ssm.inner_size", "ssm.time_step_rank"),
        "state_size": values.get("ssm.state_size"),
        "conv_kernel": values.get("ssm.conv_kernel"),
        "n_groups": values.get("ssm.group_count"),
        "partial_rotary_factor": None,
    } | ({"max_position_embeddings": 32768} if values.get("context_length") == _UNSTATED_CONTEXT else {})


def nemotron_sizes(values: Config) -> Config:
    found = {**mamba_sizes(values), "ssm_state_size": values.get("ssm.state_size")}
    if values.get("context_length") == _UNSTATED_CONTEXT:
        found["max_position_embeddings"] = 131_072
    return found


def falcon_h1_sizes(values: Config) -> Config:
    return {
        "mamba_d_ssm": values.get("ssm.inner_size"),
        "mamba_n_heads": values.get("ssm.time_step_rank"),
        "mamba_d_head": _ratio(values, "ssm.inner_size", "ssm.time_step_rank"),
        "mamba_d_state": values.get("ssm.state_size"),
        "mamba_d_conv": values.get("ssm.conv_kernel"),
        "mamba_n_groups": values.get("ssm.group_count"),
    }


def delta_sizes(values: Config) -> Config:
    return {
        "linear_num_key_heads": values.get("ssm.group_count"),
        "linear_num_value_heads": values.get("ssm.time_step_rank"),
        "linear_key_head_dim": values.get("ssm.state_size"),
        "linear_value_head_dim": _ratio(values, "ssm.inner_size", "ssm.time_step_rank"),
        "linear_conv_kernel_dim": values.get("ssm.conv_kernel"),
    }


def _has(tensors: Collection[str], ending: str) -> bool:
    return any(name.endswith(ending) for name in tensors)


def lfm2_layers(tensors: Collection[str]) -> Config:
    return {
        "conv_bias": _has(tensors, ".shortconv.in_proj.bias"),
        "full_attn_idxs": _layers_with(tensors, "attn_q.weight"),
    }


def mamba_biases(tensors: Collection[str]) -> Config:
    return {"use_bias": _has(tensors, ".ssm_in.bias"), "use_conv_bias": _has(tensors, ".ssm_conv1d.bias")}


def falcon_h1_parts(tensors: Collection[str]) -> Config:
    return {
        "mamba_conv_bias": _has(tensors, ".ssm_conv1d.bias"),
        "mamba_rms_norm": _has(tensors, ".ssm_norm.weight"),
    }


def nemotron_layers(tensors: Collection[str]) -> Config:
    """Only its tensors tell what a layer is."""
    num_layers = 1 + max(_layers_with(tensors, "attn_norm.weight"), default=-1)
    kinds = ["mlp"] * num_layers
    for tensor, kind in _KINDS_BY_TENSOR.items():
        for layer in _layers_with(tensors, tensor):
            kinds[layer] = kind
    return {**mamba_biases(tensors), "layers_block_type": kinds}


def _layers_with(tensors: Collection[str], name: str) -> list[int]:
    return [int(each.split(".")[1]) for each in tensors if each.startswith("blk.") and each.endswith(f".{name}")]


DELTA_KEYS = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
DELTA_FURTHER = {"full_attention_interval": "full_attention_interval"}
MROPE_KEYS = frozenset({"rope.dimension_sections"})  # of images; the three parts of a text's positions are equal
