"""From what the user names to a shape: a built-in name, a directory, a config.json or a GGUF file. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.config import EMBEDDED_MODEL
from headrace.errors import ModelError, UnsupportedModelError
from headrace.models.cache import EMBEDDED_BITS
from headrace.models.encoder_config import encoder_of_config
from headrace.models.hub_config import spec_from_config
from headrace.plan.catalogue import CATALOGUE, find_entry
from headrace.plan.shape import ModelShape, shape_of_mla, shape_of_spec


def find_shape(model: str) -> ModelShape:
    """The shape of a model by name or path."""
    path = Path(model).expanduser()
    if path.exists():
        return _of_path(path)
    if path.suffix in (".json", ".gguf") or model.startswith((".", "/", "~")):
        raise ModelError(f"no such file or directory: {model}")
    entry = find_entry(model)
    shape = shape_of_config(entry.hub_id, entry.config)
    if model != EMBEDDED_MODEL or shape.spec is None:
        return shape
    return replace(shape, spec=replace(shape.spec, packed_bits=EMBEDDED_BITS))  # the engine reads a GGUF file


def shape_of_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    """The shape that a config.json describes, also if the engine does not run its architecture."""
    if encoder_of_config(config) is not None:
        raise UnsupportedModelError(f"{name} is an encoder: plans are for models that generate text")
    whole, config = config, dict(config.get("text_config") or config)
    try:
        return shape_of_spec(name, spec_from_config(whole))
    except UnsupportedModelError as error:
        if config.get("kv_lora_rank"):
            return shape_of_mla(name, config, str(error))
        return _as_llama(name, config, str(error))


def _as_llama(name: str, config: Mapping[str, Any], why_not_run: str) -> ModelShape:
    """An architecture that the engine does not run, sized as a decoder of Llama's kind with the same numbers."""
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    missing = [key for key in keys if not isinstance(config.get(key), int)]
    if missing:
        raise UnsupportedModelError(f"{why_not_run}; and its size cannot be read: no {', '.join(missing)}")
    known = (*keys, "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings", "torch_dtype")
    plain = {key: config[key] for key in known if key in config}
    plain |= {"architectures": ["LlamaForCausalLM"]}
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        plain |= {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": experts, "norm_topk_prob": True}
        plain |= {"num_experts_per_tok": config.get("num_experts_per_tok", 1)}
        plain |= {"moe_intermediate_size": config.get("moe_intermediate_size") or config["intermediate_size"]}
        plain |= {"mlp_only_layers": [], "decoder_sparse_step": 1}
    return replace(shape_of_spec(name, spec_from_config(plain)), why_not_run=why_not_run, spec=None)


def _of_path(path: Path) -> ModelShape:
    if path.is_dir() and (path / "config.json").exists():
        return shape_of_config(str(path), _read_json(path / "config.json"))
    if path.suffix == ".json":
        return shape_of_config(str(path), _read_json(path))
    from headrace.models.checkpoint import open_checkpoint  # reads only the metadata of a GGUF file

    load_format = "gguf" if path.is_dir() else "random"
    return shape_of_spec(str(path), open_checkpoint(str(path), load_format=load_format).spec)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no JSON object; a model's config.json does")
    return config


def built_in_names() -> list[str]:
    return [entry.hub_id for entry in CATALOGUE]
