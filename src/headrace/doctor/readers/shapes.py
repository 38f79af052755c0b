"""The shape of a model from the sizes that records and a running engine hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import HeadraceError
from headrace.plan.shape import ModelShape
from headrace.plan.source import find_shape, shape_of_config

_KEYS = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_model_len",
}


def shape_of_sizes(model: Mapping[str, Any]) -> ModelShape | None:
    """By the sizes of `engine.in_force.shape_of`, or by the name; None if neither is known."""
    try:
        if all(isinstance(model.get(name), int) for name in _KEYS.values()) and not model.get("num_experts"):
            config = {key: model[name] for key, name in _KEYS.items()} | {"architectures": ["LlamaForCausalLM"]}
            return shape_of_config(str(model.get("name")), config)
        return find_shape(str(model["name"]))
    except (HeadraceError, KeyError, ValueError):
        return None
