"""Encoders, embedding models and classifiers, compared with transformers; and what they refuse."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace import LLM, PoolingParams, SamplingParams
from headrace.errors import ConfigError, RequestError
from tests.engine import tiny
from tests.engine.tiny_encoders import HIDDEN, save_encoder, save_modules, words

pytestmark = pytest.mark.parity

CLOSE = {"atol": 2e-5, "rtol": 2e-4}


def classifier_name(family: str, model_class: type[Any]) -> str:
    stem = model_class.__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    return f"{'Gemma3Text' if family == 'gemma3' else stem}ForSequenceClassification"


OTHER_CLASSIFIERS = [
    name
    for name, (_, model_class, _) in tiny.FAMILIES.items()
    if name not in ("gpt2", "gemma3", "qwen3") and hasattr(transformers, classifier_name(name, model_class))
]


def some_texts(count: int = 24) -> list[str]:
    """Of one to sixty words, some of the same length, more than fit into one step."""
    rng = random.Random(7)
    return [words(*(rng.randrange(60) for _ in range(rng.choice((1, 2, 9, 9, 30, 60))))) for _ in range(count)]


def inputs_of(llm: LLM, text: str, second: str | None = None) -> dict[str, torch.Tensor]:
    tokenizer = llm.get_tokenizer()
    if second is None:
        return {"input_ids": torch.tensor([tokenizer.encode(text)])}
    (pair,) = tokenizer.encode_pairs([text], [second])
    types = [int(pair.second_start is not None and i >= pair.second_start) for i in range(len(pair.token_ids))]
    return {"input_ids": torch.tensor([pair.token_ids]), "token_type_ids": torch.tensor([types])}


def states(model: transformers.PreTrainedModel, llm: LLM, text: str) -> torch.Tensor:  # [T, H]
    with torch.inference_mode():
        found: torch.Tensor = model(**inputs_of(llm, text)).last_hidden_state[0]
        return found


def logits(model: transformers.PreTrainedModel, inputs: dict[str, torch.Tensor], kind: str) -> torch.Tensor:
    if kind != "bert":
        inputs = {"input_ids": inputs["input_ids"]}
    with torch.inference_mode():
        found: torch.Tensor = model(**inputs).logits[0]
        return found


@pytest.mark.parametrize(
    "kind",
    ["bert", "modernbert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("xlm-roberta", "roberta"))],
)
def test_embeddings_of_packed_batches_equal_transformers(kind: str, tmp_path: Path) -> None:
    model = save_encoder(tmp_path, kind)
    texts = some_texts()
    with LLM(str(tmp_path), max_num_seqs=8, max_num_batched_tokens=160) as llm:
        found = llm.embed(texts, pooling="cls", normalize=False)
        means = llm.embed(texts[:3])
        assert llm.stats.scheduler.num_steps > 3 and not llm.settings.enable_chunked_prefill
        for text, output in zip(texts, found, strict=True):
            np.testing.assert_allclose(output.embedding, states(model, llm, text)[0].numpy(), **CLOSE)
        for text, output in zip(texts, means, strict=False):  # without modules: the mean, as sentence-transformers has
            mean = torch.nn.functional.normalize(states(model, llm, text).mean(0), dim=0)
            np.testing.assert_allclose(output.embedding, mean.numpy(), **CLOSE)


def test_modules_of_sentence_transformers_are_respected(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "bert")
    prompts = {"query": "w1 w2 ", "document": ""}
    dense = save_modules(tmp_path, "mean_tokens", dense=(HIDDEN, 20), max_seq_length=32, prompts=prompts)
    assert dense is not None
    with LLM(str(tmp_path)) as llm:
        assert llm.settings.max_model_len == 32
        (found,) = llm.embed("w7 w8", prompt_name="query")
        pooled = torch.tanh(dense(states(model, llm, "w1 w2 w7 w8").mean(0)))
        np.testing.assert_allclose(found.embedding, torch.nn.functional.normalize(pooled, dim=0).detach(), **CLOSE)
        with pytest.raises(RequestError, match="no prompt of this name"):
            llm.embed("w7", prompt_name="other")
        with pytest.raises(RequestError, match="maximum context length is 32 tokens"):
            llm.embed(words(*range(40)))
        (cut,) = llm.embed(words(*range(40)), truncate_prompt_tokens=-1)
        assert len(cut.prompt_token_ids) == 32 and cut.prompt_token_ids[-1] == 2
        (query, document) = llm.embed("w3", prompt_name="query")[0], llm.embed("w4")[0]
        (score,) = llm.score("w3", "w4")
        assert score.outputs.score == pytest.approx(float(query.embedding @ document.embedding), abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "num_labels"),
    [
        ("bert", 1),
        ("xlm-roberta", 3),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("modernbert", "roberta")),
    ],
)
def test_classes_and_scores_of_pairs_equal_transformers(kind: str, num_labels: int, tmp_path: Path) -> None:
    model = save_encoder(tmp_path, kind, "ForSequenceClassification", num_labels=num_labels)
    with LLM(str(tmp_path)) as llm:
        texts = some_texts(4)
        for text, output in zip(texts, llm.classify(texts), strict=True):
            raw = logits(model, inputs_of(llm, text), kind)
            expected = raw.sigmoid() if num_labels == 1 else raw.softmax(-1)
            np.testing.assert_allclose(output.outputs.probs, expected.numpy(), **CLOSE)
            assert output.outputs.label == f"LABEL_{int(raw.argmax())}"
        with pytest.raises(RequestError, match="is a classifier"):
            llm.embed("w1")
        if num_labels > 1:
            with pytest.raises(RequestError, match="a score needs one"):
                llm.score("w1", "w2")
            return
        scores = llm.score(texts[0], texts, pooling_params=PoolingParams(use_activation=False))
        for text, output in zip(texts, scores, strict=True):
            raw = logits(model, inputs_of(llm, texts[0], text), kind)
            assert output.outputs.score == pytest.approx(float(raw), abs=2e-5)


@pytest.mark.parametrize(
    "family",
    ["gpt2", "gemma3", "qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHER_CLASSIFIERS)],
)
def test_a_decoder_with_a_classification_head_equals_transformers_through_chunks(family: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    config_class, model_class, extra = tiny.FAMILIES[family]
    config = config_class(**tiny.SHAPE | extra | {"num_labels": 3, "pad_token_id": 0})
    model = getattr(transformers, classifier_name(family, model_class))(config).eval()
    model.save_pretrained(tmp_path)
    tiny.save_tokenizer(tmp_path)
    prompts = [[5, 6, 7], list(range(1, 60)), list(range(1, 40))]
    with LLM(str(tmp_path), max_num_seqs=4, max_num_batched_tokens=16, block_size=8) as llm:
        found = llm.classify(prompts, pooling_params=PoolingParams(use_activation=False))
        with pytest.raises(RequestError, match="generates no text"):
            llm.generate("hi", SamplingParams(max_tokens=1))
    for prompt, output in zip(prompts, found, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt))).logits[0]
        np.testing.assert_allclose(output.outputs.probs, expected.numpy(), **CLOSE)


def test_an_embedding_model_without_a_root_or_an_lm_head_pools_its_last_token(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = transformers.Qwen3Model(transformers.Qwen3Config(**tiny.SHAPE)).eval()
    model.save_pretrained(tmp_path)
    tiny.save_tokenizer(tmp_path)
    save_modules(tmp_path, "lasttoken")
    with LLM(str(tmp_path), hf_overrides={"is_matryoshka": True}) as llm:
        (found,) = llm.embed([5, 6, 7], pooling_params=PoolingParams(dimensions=32))
        with pytest.raises(RequestError, match="between 1 and 96"):
            llm.embed([5], pooling_params=PoolingParams(dimensions=97))
    with torch.inference_mode():
        last = model(torch.tensor([[5, 6, 7]])).last_hidden_state[0, -1, :32]
    np.testing.assert_allclose(found.embedding, torch.nn.functional.normalize(last, dim=0).numpy(), **CLOSE)


def test_a_reranker_scores_one_token_against_another_after_its_template(tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path, "qwen3")
    overrides: dict[str, Any] = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
    }
    with LLM(str(tmp_path), runner="pooling", hf_overrides=overrides, max_model_len=512) as llm:
        (output,) = llm.score("a query", "a document")
        ids = list(output.prompt_token_ids)
        text = llm.get_tokenizer().decode(ids)
        no, yes = (llm.get_tokenizer().single_id(token) for token in "ny")
    assert "<Query>: a query\n<Document>: a document<|im_end|>" in text and text.endswith("</think>\n\n")
    with torch.inference_mode():
        pair = model(torch.tensor([ids])).logits[0, -1, [no, yes]]
    assert output.outputs.score == pytest.approx(float(pair.softmax(-1)[1]), abs=1e-5)


def test_settings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save_encoder(tmp_path, "bert")
    for settings, message in (
        ({"runner": "generate"}, "does not generate text"),
        ({"convert": "classify"}, "needs a model with a classification head"),
        ({"pooler_config": {"pooling_type": "STEP"}}, "pooling_type must be one of CLS, LAST, MEAN"),
        ({"pooler_config": {"returned_token_ids": [1]}}, "is not supported"),
        ({"kv_cache_memory_bytes": 1 << 20}, "not supported for an encoder"),
        ({"tensor_parallel_size": 2}, "an encoder runs on one device"),
        ({"enable_lora": True}, "an encoder, whose layers have no adapters"),
        ({"max_num_batched_tokens": 64}, "must be at least"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(str(tmp_path), **settings)  # type: ignore[arg-type]
