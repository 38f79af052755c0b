"""Reads adapter_config.json, as PEFT writes it. What would be computed wrongly is refused. Imports no torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from headrace.errors import AdapterError

Number = TypeVar("Number", int, float)

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"

_REFUSED = {  # keys that must be empty or false, and what they ask for
    "use_dora": "weights are decomposed into length and direction (DoRA)",
    "modules_to_save": "it replaces whole modules of the model (modules_to_save)",
    "lora_bias": "its matrices have biases (lora_bias)",
    "fan_in_fan_out": "its matrices are transposed (fan_in_fan_out)",
    "layer_replication": "it repeats layers of the model (layer_replication)",
    "target_parameters": "it changes parameters that are not linear layers, such as stacks of experts",
    "trainable_token_indices": "it changes embeddings of tokens (trainable_token_indices)",
    "alora_invocation_tokens": "it works only after certain tokens (activated LoRA)",
    "use_qalora": "its inputs are pooled in groups (QALoRA)",
    "use_bdlora": "its matrices are block-diagonal (BD-LoRA)",
}
_CHANGES_MODEL = ("pissa", "olora", "corda")  # initializations that subtract the adapter from the model's weights


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    rank: int
    alpha: float
    is_rank_stabilized: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)  # by patterns of module names
    alphas: Mapping[str, float] = field(default_factory=dict)

    def rank_of(self, module: str) -> int:
        return _by_pattern(self.ranks, module, self.rank)

    def scale_of(self, module: str, rank: int) -> float:
        """What the product of the module's two matrices is multiplied by."""
        alpha = _by_pattern(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


class AdapterFiles(NamedTuple):
    config: Path
    weights: Path


def adapter_files(directory: Path) -> AdapterFiles:
    """The files of an adapter. A directory that cannot be one is refused."""
    files = AdapterFiles(directory / CONFIG, directory / WEIGHTS)
    if not files.config.is_file():
        what = "no directory" if not directory.is_dir() else f"no {CONFIG}: it is not the directory of a LoRA adapter"
        raise AdapterError(f"{directory}: there is {what}")
    if files.weights.is_file():
        return files
    if (directory / _PICKLE).is_file():
        raise AdapterError(
            f"{directory} has its weights in {_PICKLE}, a pickle, which is not read: loading one can run any code; "
            "save the adapter again as safetensors"
        )
    raise AdapterError(f"{directory}: there is no {WEIGHTS}")


def read_adapter_config(directory: Path, *, max_rank: int) -> AdapterConfig:
    path = adapter_files(directory).config
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{path} must hold a JSON object, found {type(config).__name__}")
    try:
        found = _checked(config, path)
    except (TypeError, ValueError, re.error) as error:
        raise AdapterError(f"{path} has a value that cannot be read: {error}") from error
    largest = max([found.rank, *found.ranks.values()])
    if largest > max_rank:
        raise AdapterError(
            f"{path}: rank {largest} is more than max_lora_rank={max_rank}; start with --max-lora-rank {largest}"
        )
    return found


def _checked(config: Mapping[str, Any], path: Path) -> AdapterConfig:
    kind = str(config.get("peft_type", "LORA")).upper()
    if kind != "LORA":
        raise AdapterError(f"{path}: its peft_type is {kind}; only LORA is supported")
    for key, what in _REFUSED.items():
        if config.get(key):
            raise AdapterError(f"{path}: {what}, which is not supported; merge the adapter into the model")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{path}: bias={config['bias']!r} changes biases of the model; only 'none' is supported")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_MODEL):
        raise AdapterError(
            f"{path}: init_lora_weights={start!r} belongs to changed weights of the model; save the adapter with "
            "path_initial_model_for_weight_conversion, which makes it a plain one"
        )
    ranks = {str(name): _rank(value) for name, value in (config.get("rank_pattern") or {}).items()}
    alphas = {str(name): float(value) for name, value in (config.get("alpha_pattern") or {}).items()}
    for pattern in (*ranks, *alphas):
        re.compile(pattern)
    rank = _rank(config.get("r"))
    alpha = float(config.get("lora_alpha") or rank)
    return AdapterConfig(rank, alpha, bool(config.get("use_rslora")), ranks, alphas)


def _rank(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"a rank must be an integer of at least 1, got {value!r}")
    return value


def _by_pattern(patterns: Mapping[str, Number], module: str, default: Number) -> Number:
    """The value of the first pattern that matches the end of the module's name, from a dot on, as in PEFT."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
