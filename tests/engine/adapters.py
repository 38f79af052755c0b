"""LoRA adapters for tests: random ones in PEFT's files, and the same merged into a model of transformers."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    directory: Path,
    model: transformers.PreTrainedModel,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    targets: tuple[str, ...] = TARGETS,
    size: float = 0.1,
    **config: Any,
) -> Path:
    """Save an adapter whose product is large enough to change what the model says."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in linears(model, targets):
        num_rows, width = module.weight.shape
        prefix = f"base_model.model.{name}."
        tensors[prefix + "lora_A.weight"] = torch.randn(rank, width, generator=random) * size
        tensors[prefix + "lora_B.weight"] = torch.randn(num_rows, rank, generator=random) * size
    write_adapter(directory, tensors, {"r": rank, "lora_alpha": alpha, "target_modules": list(targets)} | config)
    return directory


def write_adapter(directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    whole = {"peft_type": "LORA", "bias": "none", "task_type": "CAUSAL_LM"} | config
    (directory / "adapter_config.json").write_text(json.dumps(whole))


def merged(model: transformers.PreTrainedModel, directory: Path) -> transformers.PreTrainedModel:
    """A copy of the model whose weights are W + scale B A."""
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors, found = load_file(directory / "adapter_model.safetensors"), copy.deepcopy(model)
    for name, module in found.named_modules():
        down = tensors.get(f"base_model.model.{name}.lora_A.weight")
        if down is None:
            continue
        scale = config["lora_alpha"] / (math.sqrt(len(down)) if config.get("use_rslora") else len(down))
        up = tensors[f"base_model.model.{name}.lora_B.weight"]
        module.weight.data += (scale * up.double() @ down.double()).float()
    return found


def linears(model: transformers.PreTrainedModel, targets: tuple[str, ...]) -> list[tuple[str, nn.Linear]]:
    modules = [(name, module) for name, module in model.named_modules() if name.endswith(targets)]
    return [(name, module) for name, module in modules if isinstance(module, nn.Linear)]


def greedy_logprobs(
    model: transformers.PreTrainedModel, prompt: list[int], num_tokens: int
) -> tuple[list[int], list[float]]:
    """Greedy tokens and the log-probability of each, from the whole context."""
    tokens, logprobs = list(prompt), []
    with torch.inference_mode():
        for _ in range(num_tokens):
            scores = model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(0)
            tokens.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
    return tokens[len(prompt) :], logprobs
