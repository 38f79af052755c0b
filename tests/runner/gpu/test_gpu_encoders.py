"""Embeddings and classes on a GPU, in bfloat16, against transformers in float32 on the same weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace import LLM, PoolingParams
from tests.engine import tiny
from tests.engine.tiny_encoders import KINDS, save_encoder, save_modules, words

pytestmark = pytest.mark.gpu

MIN_COSINE = 0.995  # bfloat16 through three layers
NEAR = 0.06  # of outputs of a head of about size 1


def some_texts() -> list[str]:
    rng = random.Random(7)
    lens = (1, 2, 9, 9, 15, 17, 30, 31, 60, 63, 100, 126)
    return [words(*(rng.randrange(60) for _ in range(rng.choice(lens)))) for _ in range(200)]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_of_packed_batches_are_near_those_of_float32(kind: str, pooling: str, tmp_path: Path) -> None:
    model = save_encoder(tmp_path, kind)
    texts = some_texts()
    with LLM(str(tmp_path), max_num_seqs=64, max_num_batched_tokens=2048) as llm:
        found = llm.embed(texts, pooling=pooling, normalize=False)  # type: ignore[arg-type]
        again = llm.embed(texts[:1], pooling=pooling, normalize=False)  # type: ignore[arg-type]
    cosines = []
    for output in found:
        with torch.inference_mode():
            states = model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
        cosines.append(cosine(output.embedding, (states[0] if pooling == "cls" else states.mean(0)).numpy()))
    assert min(cosines) > MIN_COSINE
    assert cosine(found[0].embedding, again[0].embedding) > MIN_COSINE  # alone as in a batch


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_classifiers_are_near_those_of_float32(kind: str, tmp_path: Path) -> None:
    model = save_encoder(tmp_path, kind, "ForSequenceClassification", num_labels=3)
    with LLM(str(tmp_path)) as llm:
        found = llm.classify(some_texts()[:20])
    for output in found:
        with torch.inference_mode():
            expected = model(torch.tensor([output.prompt_token_ids])).logits[0].softmax(-1)
        np.testing.assert_allclose(output.outputs.probs, expected.numpy(), atol=NEAR)


def test_a_decoder_with_a_classification_head_needs_no_lm_head(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = transformers.Qwen3Config(**tiny.SHAPE | {"num_labels": 3, "pad_token_id": 0})
    model = transformers.Qwen3ForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    tiny.save_tokenizer(tmp_path)
    prompts = [[5], [5, 6, 7], list(range(1, 300)), list(range(1, 40))]
    with LLM(str(tmp_path), max_num_batched_tokens=128, max_num_seqs=16) as llm:
        found = llm.classify(prompts, pooling_params=PoolingParams(use_activation=False))
    for prompt, output in zip(prompts, found, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt))).logits[0]
        np.testing.assert_allclose(output.outputs.probs, expected.numpy(), atol=NEAR)


@pytest.mark.parametrize(("quantization", "min_cosine"), [(None, MIN_COSINE), ("fp8", 0.99)])
def test_embeddings_of_a_decoders_last_token_are_near_those_of_float32(
    quantization: Any, min_cosine: float, tmp_path: Path
) -> None:
    """In chunks, and with prefix hits the second time."""
    torch.manual_seed(3)
    model = transformers.Qwen3Model(transformers.Qwen3Config(**tiny.SHAPE)).eval()
    model.save_pretrained(tmp_path)
    tiny.save_tokenizer(tmp_path)
    save_modules(tmp_path, "lasttoken")
    prompts = [[5], [5, 6, 7], list(range(1, 300)), list(range(1, 40)), list(range(1, 290))]
    with LLM(str(tmp_path), max_num_batched_tokens=128, max_num_seqs=16, quantization=quantization) as llm:
        for _ in range(2):
            for prompt, output in zip(prompts, llm.embed(prompts, use_tqdm=False), strict=True):
                with torch.inference_mode():
                    expected = model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
                assert cosine(output.embedding, expected) > min_cosine
        assert llm.stats.scheduler.num_prefix_hit_tokens > 0
