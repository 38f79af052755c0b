"""Small models that sentence-transformers itself saves, where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.engine.tiny_encoders import HIDDEN, save_encoder, words

TEXTS = [words(1), words(2, 3, 4), words(*range(30)), words(*range(20, 50)), words(5, 5, 5)]


def save_for_auto_tokenizer(directory: Path, *, has_types: bool = False) -> None:
    """sentence-transformers loads the tokenizer with transformers, which needs its config."""
    named = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    path, inputs = str(directory / "tokenizer.json"), ["input_ids", "attention_mask"]
    inputs += ["token_type_ids"] if has_types else []
    made = transformers.PreTrainedTokenizerFast(tokenizer_file=path, model_input_names=inputs, **named)
    made.save_pretrained(directory)


def save_embedding_model(directory: Path, kind: str, pooling: str) -> Any:
    """Saves an encoder with modules of sentence-transformers in `saved`, and returns its model."""
    save_encoder(directory / "base", kind)
    save_for_auto_tokenizer(directory / "base")
    parts = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    modules = [
        parts.Transformer(str(directory / "base"), max_seq_length=40),
        parts.Pooling(HIDDEN, pooling_mode=pooling),
        *([parts.Dense(HIDDEN, 24)] if kind == "bert" else []),
        *([parts.Normalize()] if pooling == "mean" else []),
    ]
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(modules=modules, device="cpu", prompts={"query": "w9 w8 ", "document": ""})
    model.save(str(directory / "saved"))
    return model


def save_cross_encoder(directory: Path, kind: str, *, has_types: bool = False) -> Any:
    save_encoder(directory / "base", kind, "ForSequenceClassification", num_labels=1)
    save_for_auto_tokenizer(directory / "base", has_types=has_types)
    library = pytest.importorskip("sentence_transformers")
    model = library.CrossEncoder(str(directory / "base"), device="cpu")
    model.save_pretrained(str(directory / "saved"))
    return model
