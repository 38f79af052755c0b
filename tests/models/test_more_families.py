"""More families against transformers, one compact run each: chunks of prompts, decoding and both in one step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace.models.spec import ModelSpec
from tests import seeds
from tests.models.test_parity import SCHEDULES, TEXT_LENS, PagedRun, is_gain, load
from tests.tolerances import assert_logits

pytestmark = pytest.mark.parity

VOCAB_SIZE = 96
TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 1, 2]}
PIXTRAL = {"model_type": "pixtral", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
PIXTRAL |= {"intermediate_size": 16, "image_size": 28, "patch_size": 14, "head_dim": 8}
SIGLIP = PIXTRAL | {"model_type": "siglip_vision_model"}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
QWEN3_VISION = QWEN_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}


def multimodal(name: str, model: str, text: dict[str, Any], vision: dict[str, Any], **others: Any) -> Any:
    config = getattr(transformers, f"{name}Config")
    return getattr(transformers, model)(config(text_config=TINY | text, vision_config=vision, **others))


def causal(name: str, **values: Any) -> Any:
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**TINY | values))


MODELS: dict[str, Any] = {
    "gemma 3 with images": lambda: multimodal(
        "Gemma3",
        "Gemma3ForConditionalGeneration",
        {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 6},
        SIGLIP,
        mm_tokens_per_image=1,
    ),
    "mistral small 3": lambda: multimodal(
        "Mistral3",
        "Mistral3ForConditionalGeneration",
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        PIXTRAL,
        tie_word_embeddings=False,
    ),
    "ministral 3 with images": lambda: multimodal(
        "Mistral3",
        "Mistral3ForConditionalGeneration",
        {"model_type": "ministral3", "head_dim": 16, "tie_word_embeddings": True, "rope_parameters": MINISTRAL3_ROPE},
        PIXTRAL,
        tie_word_embeddings=True,
    ),
    "ministral 3": lambda: causal("Ministral3", head_dim=16, rope_parameters=MINISTRAL3_ROPE),
    "qwen2-vl": lambda: multimodal(
        "Qwen2VL",
        "Qwen2VLForConditionalGeneration",
        {"rope_parameters": MROPE},
        {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2},
    ),
    "qwen2.5-vl": lambda: multimodal(
        "Qwen2_5_VL", "Qwen2_5_VLForConditionalGeneration", {"rope_parameters": MROPE}, QWEN_VISION
    ),
    "qwen3-vl": lambda: multimodal(
        "Qwen3VL",
        "Qwen3VLForConditionalGeneration",
        {"rope_parameters": MROPE | {"mrope_interleaved": True}, "head_dim": 16},
        QWEN3_VISION,
    ),
    "qwen3-vl moe": lambda: multimodal(
        "Qwen3VLMoe",
        "Qwen3VLMoeForConditionalGeneration",
        {"rope_parameters": MROPE | {"mrope_interleaved": True}, **EXPERTS},
        QWEN3_VISION,
    ),
}


def build(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(seeds.seed_of(name))
    model: transformers.PreTrainedModel = MODELS[name]().float().eval()
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            parameter.normal_(1.0 if is_gain(each) else 0.0, 0.3)
        for each, buffer in model.named_buffers():
            if "correction_bias" in each or each.endswith("moe_statics.e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    return model


def check(model: transformers.PreTrainedModel, directory: Path) -> ModelSpec:
    """Compares logits of texts that are computed in chunks, in mixed batches."""
    ours = load(directory)
    texts = [torch.randint(VOCAB_SIZE, (length,)) for length in TEXT_LENS]
    run = PagedRun(ours, texts)
    for step in SCHEDULES["mixed batches"]:
        run.step(step)
    for text, parts in zip(texts, run.logits, strict=True):
        expected = assert_logits(torch.cat(parts), model, text)
        assert expected.std() > 0.3
    return ours.spec


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    check(model, tmp_path)
