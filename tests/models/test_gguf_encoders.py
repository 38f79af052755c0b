"""Encoders from GGUF files, named and arranged as llama.cpp's converter does it, compared with transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from headrace import LLM, PoolingParams
from headrace.errors import UnsupportedModelError
from headrace.models import open_checkpoint
from tests.engine.tiny_encoders import SHAPE, WORDS, save_encoder, words
from tests.models.test_gguf import add

pytestmark = pytest.mark.parity

ARCHITECTURES = {"bert": "bert", "xlm-roberta": "bert", "modernbert": "modern-bert"}
CLOSE = {"atol": 2e-5, "rtol": 2e-4}
TEXTS = [words(1), words(2, 3, 4), words(*range(40)), words(5, 5, 59)]
SIGNS = ["!", "!!#$", "%&'()*+,-./0123456789:;<=>?@" * 3, "!!!!"]  # a byte each, or two
CONTROL, NORMAL = 3, 1


def tensors_of(model: transformers.PreTrainedModel, kind: str) -> dict[str, np.ndarray]:
    """Without BERT's pooler; the first rows of RoBERTa's positions are cut off, and lone rows become vectors."""
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[ARCHITECTURES[kind]]
    names = gguf.get_tensor_name_map(architecture, SHAPE["num_hidden_layers"])
    tensors = {}
    for name, tensor in model.state_dict().items():
        stem, _, end = re.sub(r"^(bert|roberta|model)\.", "", name).rpartition(".")
        if "pooler" in stem or end == "position_ids":
            continue
        weight = tensor.numpy()
        if kind == "xlm-roberta" and "position_embeddings" in stem:
            weight = weight[SHAPE["pad_token_id"] + 1 :]
        stem = "classifier.out_proj" if stem == "classifier" else stem
        tensors[f"{names.get_name(stem)}.{end}"] = weight.squeeze() if weight.size > 1 else weight
    return tensors


def save(
    directory: Path,
    model: transformers.PreTrainedModel,
    kind: str,
    *,
    without: str | None = None,
    **extra: Any,
) -> str:
    """`without` is a tensor to leave out."""
    architecture, offset = ARCHITECTURES[kind], SHAPE["pad_token_id"] + 1 if kind == "xlm-roberta" else 0
    keys = {
        "context_length": SHAPE["max_position_embeddings"] - offset,
        "embedding_length": SHAPE["hidden_size"],
        "feed_forward_length": SHAPE["intermediate_size"],
        "block_count": SHAPE["num_hidden_layers"],
        "attention.head_count": SHAPE["num_attention_heads"],
        "attention.layer_norm_epsilon": 1e-5 if kind == "modernbert" else 1e-12,
        "attention.causal": False,
        **extra,
    }
    writer = gguf.GGUFWriter(directory / "model.gguf", architecture)
    for key, value in keys.items():
        add(writer, f"{architecture}.{key}", value)
    add_tokenizer(writer, kind)
    for name, tensor in tensors_of(model, kind).items():
        if name != without:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return str(directory / "model.gguf")


def add_tokenizer(writer: gguf.GGUFWriter, kind: str) -> None:
    special = ["<pad>", "<s>", "</s>", "<unk>"] if kind == "xlm-roberta" else list(WORDS[:4])
    writer.add_token_types([CONTROL] * 4 + [NORMAL] * (len(WORDS) - 4))
    writer.add_unk_token_id(3)
    if kind == "modernbert":
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("modern-bert")
        writer.add_token_merges(["! !"])
        pieces = ["!!", *(chr(33 + index) for index in range(len(WORDS) - 5))]
    else:
        writer.add_tokenizer_model("t5" if kind == "xlm-roberta" else "bert")
        writer.add_token_scores([0.0] * 4 + [-1.0] * (len(WORDS) - 4))
        pieces = [f"\u2581{word}" for word in WORDS[4:]]
    writer.add_token_list([*special, *pieces])


def states(model: transformers.PreTrainedModel, ids: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([ids])).last_hidden_state[0]
        return found


EXTRA = {
    "modernbert": {
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": 3,
        "rope.freq_base": 160_000.0,
        "rope.freq_base_swa": 10_000.0,
    }
}


@pytest.mark.parametrize(("pooling", "number"), [("mean", 1), ("cls", 2)])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_embeddings_of_a_file_equal_transformers(kind: str, pooling: str, number: int, tmp_path: Path) -> None:
    model = save_encoder(tmp_path / "model", kind)
    path = save(tmp_path, model, kind, pooling_type=number, **EXTRA.get(kind, {}))
    with LLM(path) as llm:
        assert llm.settings.max_model_len == SHAPE["max_position_embeddings"] - (kind == "xlm-roberta")
        found = llm.embed(SIGNS if kind == "modernbert" else TEXTS)
    for output in found:
        ids = tuple(output.prompt_token_ids)
        assert (ids[0], ids[-1]) == (1, 2) and 3 not in ids[1:-1]
        hidden = states(model, ids)
        expected = torch.nn.functional.normalize(hidden[0] if pooling == "cls" else hidden.mean(0), dim=0)
        np.testing.assert_allclose(output.embedding, expected.numpy(), **CLOSE)


HEADS = {"modernbert": {"classifier_pooling": "mean"}}
RANK = 4  # of llama.cpp's pooling types


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("kind", ["xlm-roberta", "modernbert"])
def test_classifiers_of_a_file_equal_transformers(kind: str, num_labels: int, tmp_path: Path) -> None:
    more = {"num_labels": num_labels, **HEADS.get(kind, {})}
    model = save_encoder(tmp_path / "model", kind, "ForSequenceClassification", **more)
    labels = [f"label {index}" for index in range(num_labels)]
    stated = EXTRA.get(kind, {}) | {"classifier.output_labels": labels, "pooling_type": RANK}
    path = save(tmp_path, model, kind, **stated)
    texts = SIGNS if kind == "modernbert" else TEXTS
    with LLM(path) as llm:
        found = llm.classify(texts, pooling_params=PoolingParams(use_activation=False))
        scores = llm.score(texts[0], texts[1:]) if num_labels == 1 else []
    assert found[0].outputs.label in labels
    for output in found:
        with torch.inference_mode():
            expected = model(torch.tensor([output.prompt_token_ids])).logits[0]
        np.testing.assert_allclose(output.outputs.probs, expected.numpy(), **CLOSE)
    for score in scores:
        with torch.inference_mode():
            expected = model(torch.tensor([score.prompt_token_ids])).logits[0].sigmoid()
        # XLM-RoBERTa's end token is twice between two texts.
        assert list(score.prompt_token_ids).count(2) == (3 if kind == "xlm-roberta" else 2)
        assert score.outputs.score == pytest.approx(float(expected), abs=1e-5)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"pooling_type": 4}, "pooling_type 4"),
        ({"attention.alibi_bias_max": 8.0}, "alibi_bias_max"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = save(tmp_path, save_encoder(tmp_path / "model", "bert"), "bert", **extra)
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(path)


def test_a_classifier_of_bert_is_refused_since_its_pooler_is_missing(tmp_path: Path) -> None:
    model = save_encoder(tmp_path / "model", "bert", "ForSequenceClassification", num_labels=1)
    with pytest.raises(UnsupportedModelError, match=r"a classifier of bert in a GGUF file.*pooler"):
        open_checkpoint(save(tmp_path, model, "bert"))


def test_a_classifier_of_modernbert_is_refused_if_its_norm_is_missing(tmp_path: Path) -> None:
    more = {"num_labels": 1, "classifier_pooling": "mean"}
    model = save_encoder(tmp_path / "model", "modernbert", "ForSequenceClassification", **more)
    path = save(tmp_path, model, "modernbert", without="cls.norm.weight", **EXTRA["modernbert"])
    with pytest.raises(UnsupportedModelError, match="a classifier of modernbert without"):
        open_checkpoint(path)
