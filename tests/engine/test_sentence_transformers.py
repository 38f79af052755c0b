"""Embedding models and cross-encoders saved by sentence-transformers itself, compared with its own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace import LLM
from tests.engine import tiny
from tests.engine.sentence_models import TEXTS, save_cross_encoder, save_embedding_model
from tests.engine.tiny_encoders import words

library: Any = pytest.importorskip("sentence_transformers", minversion="6.0")

pytestmark = [pytest.mark.parity, pytest.mark.slow]

LONG = words(*range(60))  # more than max_seq_length


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "roberta", "modernbert"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_embeddings_are_those_of_sentence_transformers(kind: str, pooling: str, tmp_path: Path) -> None:
    model = save_embedding_model(tmp_path, kind, pooling)
    with LLM(str(tmp_path / "saved")) as llm:
        assert llm.settings.max_model_len == 40
        found = [output.embedding for output in llm.embed([*TEXTS, LONG], truncate_prompt_tokens=-1)]
        np.testing.assert_allclose(found, model.encode([*TEXTS, LONG]), atol=1e-5, rtol=1e-4)
        queries = [output.embedding for output in llm.embed(TEXTS, prompt_name="query")]
        np.testing.assert_allclose(queries, model.encode(TEXTS, prompt_name="query"), atol=1e-5, rtol=1e-4)
        scores = [output.outputs.score for output in llm.score(TEXTS[1], TEXTS)]  # type: ignore[union-attr]
        expected = library.util.cos_sim(model.encode_query([TEXTS[1]]), model.encode_document(TEXTS))
        np.testing.assert_allclose(scores, expected[0].numpy(), atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_embeddings_of_a_decoder_are_those_of_sentence_transformers(family: str, tmp_path: Path) -> None:
    """As Qwen3-Embedding and e5-mistral are: the last token, normalized, and a prompt for queries."""
    base, saved = tmp_path / "base", tmp_path / "saved"
    tiny.save_model(base, family)
    tokenizer_file = str(base / "tokenizer.json")
    transformers.PreTrainedTokenizerFast(tokenizer_file=tokenizer_file, pad_token="<eos>").save_pretrained(base)
    parts = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    modules = [
        parts.Transformer(str(base), max_seq_length=200),
        parts.Pooling(tiny.SHAPE["hidden_size"], pooling_mode="lasttoken"),
        parts.Normalize(),
    ]
    model = library.SentenceTransformer(modules=modules, device="cpu", prompts={"query": "Query: ", "document": ""})
    model.save(str(saved))
    texts = ["river", "a mill by the river", "stones " * 20]
    with LLM(str(saved)) as llm:
        found = [output.embedding for output in llm.embed(texts)]
        queries = [output.embedding for output in llm.embed(texts, prompt_name="query")]
        scores = [output.outputs.score for output in llm.score(texts[0], texts)]  # type: ignore[union-attr]
    np.testing.assert_allclose(found, model.encode(texts), atol=1e-4)
    np.testing.assert_allclose(queries, model.encode(texts, prompt_name="query"), atol=1e-4)
    expected = library.util.cos_sim(model.encode_query([texts[0]]), model.encode_document(texts))
    np.testing.assert_allclose(scores, expected[0].numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "has_types"), [("bert", True), ("bert", False), ("xlm-roberta", False), ("modernbert", False)]
)
def test_scores_of_a_cross_encoder_are_those_of_sentence_transformers(
    kind: str, has_types: bool, tmp_path: Path
) -> None:
    model = save_cross_encoder(tmp_path, kind, has_types=has_types)
    with LLM(str(tmp_path / "saved")) as llm:
        found = [output.outputs.score for output in llm.score(TEXTS[1], TEXTS)]  # type: ignore[union-attr]
    np.testing.assert_allclose(found, model.predict([(TEXTS[1], text) for text in TEXTS]), atol=1e-5, rtol=1e-4)


def test_scores_of_a_reranker_that_answers_with_a_token_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    """As Qwen3-Reranker: recognised by its module. sentence-transformers reads the template from the tokenizer."""
    base, saved = tmp_path / "base", tmp_path / "saved"
    tiny.save_model(base, "qwen3")
    parts = pytest.importorskip("sentence_transformers.cross_encoder.modules")
    transformer = pytest.importorskip("sentence_transformers.base.modules").Transformer
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(base / "tokenizer.json"), pad_token="<eos>")
    tokenizer.chat_template = reranker_template(base)
    tokenizer.save_pretrained(base)
    score = parts.LogitScore(true_token_id=90, false_token_id=80)
    modules = [transformer(str(base), transformer_task="text-generation"), score]
    model = library.CrossEncoder(modules=modules, device="cpu")
    model.save_pretrained(str(saved))
    documents = ["a mill", "stones and water", "x"]
    with LLM(str(saved), max_model_len=512) as llm:
        found = [output.outputs.score for output in llm.score("a river", documents)]  # type: ignore[union-attr]
    expected = model.predict([("a river", document) for document in documents], activation_fn=torch.nn.Sigmoid())
    np.testing.assert_allclose(found, expected, atol=1e-4)


def reranker_template(directory: Path) -> str:
    """Our prompt of a pair as a chat template over sentence-transformers' messages of a query and a document."""
    overrides: dict[str, Any] = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
    }
    with LLM(str(directory), runner="pooling", hf_overrides=overrides, max_model_len=512) as llm:
        (output,) = llm.score("QUERY", "DOCUMENT")
        text = llm.get_tokenizer().decode(output.prompt_token_ids)
    assert text.endswith("\n\n")
    for role in ("query", "document"):
        content = f"{{{{ (messages | selectattr('role', 'eq', '{role}') | first).content }}}}"
        text = text.replace(role.upper(), content)
    return text.removesuffix("\n\n") + "{{ '\\n\\n' }}"  # a template's last line break would be dropped
