"""The models that stand for those of the tests, written below build/compat: each a checkpoint, a tokenizer and, for
tests of LoRA, an adapter with random weights."""

from __future__ import annotations

import hashlib
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
from tests.compat import scripted_model
from tests.engine.tiny_encoders import save_encoder

SMOLLM2, SCRIPTED, ENCODER, RERANKER = "smollm2", "scripted", "encoder", "reranker"
MAX_MODEL_LEN, SHORT_LEN = 16384, 1536
LORA_RANK = 8


@dataclass(frozen=True)
class StandIn:
    """One model, as the adapter gets to know it."""

    name: str
    checkpoint: Path
    tokenizer: Path  # as transformers reads it
    adapter: Path | None = None
    max_model_len: int = MAX_MODEL_LEN  # tests that ask for more get this

    def settings(self) -> dict[str, Any]:
        adapter = None if self.adapter is None else str(self.adapter)
        paths = {"model": str(self.checkpoint), "tokenizer": str(self.tokenizer), "adapter": adapter}
        return {**paths, "max_model_len": self.max_model_len}


class StandIns:
    """Writes each model when it is first asked for, unless it was written by the same code before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        sources = (Path(__file__), Path(scripted_model.__file__))
        self._version = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()

    def __getitem__(self, name: str) -> StandIn:
        folder, writer = self._folder / f"{name}-{self._version[:8]}", WRITERS[name]
        if not (folder / "is_complete").exists():
            folder.mkdir(parents=True, exist_ok=True)
            writer.write(folder)
            (folder / "is_complete").touch()
        return writer.stand_in(folder)


@dataclass(frozen=True)
class Writer:
    """Writes one model into a folder that exists."""

    write: Callable[[Path], None]
    stand_in: Callable[[Path], StandIn]


def _write_smollm2(folder: Path) -> None:
    """The embedded model with a template that shows tools, and with a longer context."""
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


def _write_scripted(folder: Path) -> None:
    """See `scripted_model.py`. Its tokenizer is SmolLM2's with more tokens."""
    tokenizer = load_tokenizer(open_checkpoint(SMOLLM2).text)
    scripted_model.write_scripted_model(folder, tokenizer.serialized(), tokenizer.special_tokens)


def _write_encoder(folder: Path) -> None:
    """A small XLM-RoBERTa with random weights, for tests of an embedding model."""
    save_encoder(folder, "xlm-roberta", max_position_embeddings=514)


def _write_reranker(folder: Path) -> None:
    """A small BERT with random weights and one output, for tests of a cross-encoder."""
    save_encoder(folder, "bert", "ForSequenceClassification", num_labels=1, max_position_embeddings=512)


WRITERS = {
    SMOLLM2: Writer(
        _write_smollm2,
        lambda folder: StandIn(SMOLLM2, folder / "model.gguf", folder / "tokenizer", folder / "adapter", SHORT_LEN),
    ),
    SCRIPTED: Writer(_write_scripted, lambda folder: StandIn(SCRIPTED, folder, folder)),
    ENCODER: Writer(_write_encoder, lambda folder: StandIn(ENCODER, folder, folder)),
    RERANKER: Writer(_write_reranker, lambda folder: StandIn(RERANKER, folder, folder)),
}


def _write_adapter(folder: Path, *, num_layers: int, hidden: int, query: int, value: int) -> None:
    """A LoRA adapter in PEFT's format. Its random product is small, so answers differ and are still texts."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(3)
    tensors = {}
    for layer in range(num_layers):
        for name, width in (("q_proj", query), ("v_proj", value)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(LORA_RANK, hidden) * hidden**-0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(width, LORA_RANK) * 0.02
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
