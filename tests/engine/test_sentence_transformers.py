"""Embedding models and cross-encoders saved by sentence-transformers itself, compared with its own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from headrace import LLM
from tests.engine.tiny_encoders import HIDDEN, save_encoder, words

library: Any = pytest.importorskip("sentence_transformers")

pytestmark = [pytest.mark.parity, pytest.mark.slow]

TEXTS = [words(1), words(2, 3, 4), words(*range(30)), words(*range(20, 50)), words(5, 5, 5)]
LONG = words(*range(60))  # more than max_seq_length


def save_for_auto_tokenizer(directory: Path) -> None:
    """sentence-transformers loads the tokenizer with transformers, which needs its config."""
    named = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    path = str(directory / "tokenizer.json")
    transformers.PreTrainedTokenizerFast(tokenizer_file=path, **named).save_pretrained(directory)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "modernbert"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_embeddings_are_those_of_sentence_transformers(kind: str, pooling: str, tmp_path: Path) -> None:
    base, saved = tmp_path / "base", tmp_path / "saved"
    save_encoder(base, kind)
    save_for_auto_tokenizer(base)
    parts = library.models
    modules = [
        parts.Transformer(str(base), max_seq_length=40),
        parts.Pooling(HIDDEN, pooling_mode=pooling),
        *([parts.Dense(HIDDEN, 24)] if kind == "bert" else []),
        *([parts.Normalize()] if pooling == "mean" else []),
    ]
    model = library.SentenceTransformer(modules=modules, device="cpu", prompts={"query": "w9 w8 ", "document": ""})
    model.save(str(saved))
    with LLM(str(saved)) as llm:
        assert llm.settings.max_model_len == 40
        found = [output.embedding for output in llm.embed([*TEXTS, LONG], truncate_prompt_tokens=-1)]
        np.testing.assert_allclose(found, model.encode([*TEXTS, LONG]), atol=1e-5, rtol=1e-4)
        queries = [output.embedding for output in llm.embed(TEXTS, prompt_name="query")]
        np.testing.assert_allclose(queries, model.encode(TEXTS, prompt_name="query"), atol=1e-5, rtol=1e-4)
        scores = [output.outputs.score for output in llm.score(TEXTS[1], TEXTS)]  # type: ignore[union-attr]
        expected = library.util.cos_sim(model.encode_query([TEXTS[1]]), model.encode_document(TEXTS))
        np.testing.assert_allclose(scores, expected[0].numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_scores_of_a_cross_encoder_are_those_of_sentence_transformers(kind: str, tmp_path: Path) -> None:
    base, saved = tmp_path / "base", tmp_path / "saved"
    save_encoder(base, kind, "ForSequenceClassification", num_labels=1)
    save_for_auto_tokenizer(base)
    model = library.CrossEncoder(str(base), device="cpu")
    model.save_pretrained(str(saved))
    with LLM(str(saved)) as llm:
        found = [output.outputs.score for output in llm.score(TEXTS[1], TEXTS)]  # type: ignore[union-attr]
    np.testing.assert_allclose(found, model.predict([(TEXTS[1], text) for text in TEXTS]), atol=1e-5, rtol=1e-4)
