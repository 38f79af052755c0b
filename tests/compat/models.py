"""The models that stand for those of the tests, written below build/compat: each a checkpoint, a tokenizer and, for
tests of LoRA, an adapter that changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headrace.models import open_checkpoint
from headrace.models.sources import locate
from headrace.text import load_tokenizer
from tests.clients.tools_model import TEMPLATE, write_tools_model
from tests.compat.scripted_model import write_scripted_model
from tests.engine.tiny_encoders import save_encoder

SMOLLM2 = "smollm2"
MAX_MODEL_LEN = 16384
LORA_RANK = 8


@dataclass(frozen=True)
class StandIn:
    """One model, as the adapter gets to know it."""

    name: str
    checkpoint: Path
    tokenizer: Path  # as transformers reads it
    adapter: Path | None = None

    def settings(self) -> dict[str, Any]:
        adapter = None if self.adapter is None else str(self.adapter)
        return {"model": str(self.checkpoint), "tokenizer": str(self.tokenizer), "adapter": adapter}


class StandIns:
    """Writes each model when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: dict[str, StandIn] = {}

    def __getitem__(self, name: str) -> StandIn:
        if name not in self._written:
            self._written[name] = WRITERS[name](self._folder / name)
        return self._written[name]


def _smollm2(folder: Path) -> StandIn:
    """The embedded model with a template that shows tools, and with a longer context."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, tokenizer_folder = folder / "model.gguf", folder / "tokenizer"
    write_tools_model(locate(SMOLLM2), checkpoint)
    command = [sys.executable, "-m", "gguf.scripts.gguf_set_metadata", "--force", str(checkpoint)]
    subprocess.run([*command, "llama.context_length", str(MAX_MODEL_LEN)], check=True, capture_output=True)
    tokenizer = load_tokenizer(open_checkpoint(SMOLLM2).text)
    tokenizer_folder.mkdir(exist_ok=True)
    (tokenizer_folder / "tokenizer.json").write_text(tokenizer.serialized(), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens,
    }
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    _write_adapter(folder / "adapter", num_layers=30, hidden=576, query=576, value=192)
    return StandIn(SMOLLM2, checkpoint, tokenizer_folder, folder / "adapter")


def _scripted(folder: Path) -> StandIn:
    """See `scripted_model.py`. Its tokenizer is SmolLM2's with more tokens."""
    tokenizer = load_tokenizer(open_checkpoint(SMOLLM2).text)
    write_scripted_model(folder, tokenizer.serialized(), tokenizer.special_tokens)
    return StandIn("scripted", folder, folder)


def _encoder(folder: Path) -> StandIn:
    """A small XLM-RoBERTa with random weights, for tests of an embedding model."""
    folder.mkdir(parents=True, exist_ok=True)
    save_encoder(folder, "xlm-roberta", max_position_embeddings=514)
    return StandIn("encoder", folder, folder)


WRITERS: dict[str, Callable[[Path], StandIn]] = {SMOLLM2: _smollm2, "scripted": _scripted, "encoder": _encoder}


def _write_adapter(folder: Path, *, num_layers: int, hidden: int, query: int, value: int) -> None:
    """A LoRA adapter in PEFT's format. Its B matrices are zero, so answers stay those of the base model."""
    folder.mkdir(exist_ok=True)
    tensors = {}
    for layer in range(num_layers):
        for name, width in (("q_proj", query), ("v_proj", value)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.full((LORA_RANK, hidden), 0.01)
            tensors[f"{prefix}.lora_B.weight"] = torch.zeros(width, LORA_RANK)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": SMOLLM2,
        "r": LORA_RANK,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
