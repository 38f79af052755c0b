"""The config.json of published checkpoints: each is accepted, or refused for a true reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UnsupportedModelError
from headrace.models.encoder_config import encoder_of_config, encoder_spec
from headrace.models.encoder_spec import EncoderSpec
from headrace.models.hub_config import spec_from_config
from headrace.models.spec import ModelSpec

LINES = (Path(__file__).parent / "data" / "published_configs.jsonl").read_text(encoding="utf-8").splitlines()
CONFIGS: dict[str, dict[str, Any]] = {line["checkpoint"]: line["config"] for line in map(json.loads, LINES)}

UNKNOWN = r"architecture '\w+' is not supported"
SPARSE = "sparse attention"
LATENT = "multi-head latent attention"
RECURRENT = "recurrent layers"
MIXTURE = "a mixture of experts of a kind"
BIDIRECTIONAL = "use_bidirectional_attention=True"
REFUSED = {
    "chatglm": UNKNOWN,
    "deepseek": MIXTURE,
    "deepseek-ai/DeepSeek-V3.2": SPARSE,
    "deepseek-ai/DeepSeek-V4-Flash": SPARSE,
    "deepseek-ai/DeepSeek-V4-Pro": SPARSE,
    "google/gemma-4-26B-A4B": MIXTURE,
    "google/embeddinggemma-300m": BIDIRECTIONAL,
    "LGAI-EXAONE/EXAONE-4.5-33B": UNKNOWN,
    "llava": UNKNOWN,
    "minicpm-moe-8x2b": MIXTURE,
    "minicpm_2b": UNKNOWN,
    "minicpm_2b_sft_bf16": UNKNOWN,
    "MiniMaxAI/MiniMax-M3": MIXTURE,
    "moonshotai/Kimi-K2.5": LATENT,
    "moonshotai/Kimi-K3": RECURRENT,
    "nvidia/Gemma-4-31B-IT-NVFP4": UNKNOWN,
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1": UNKNOWN,
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8": "moe_latent_size=1024",
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": "moe_latent_size=2048",
    "orion": UNKNOWN,
    "phi-3_5-vision": UNKNOWN,
    "qwen": UNKNOWN,
    "rwkv5_3b": RECURRENT,
    "stepfun-ai/Step-3.7-Flash": MIXTURE,
    "XiaomiMiMo/MiMo-7B-Base": UNKNOWN,
    "XiaomiMiMo/MiMo-V2-Flash": MIXTURE,
    "zai-org/GLM-5": SPARSE,
    "zai-org/GLM-5.1": SPARSE,
    "zai-org/GLM-5.2": SPARSE,
}


def test_most_published_configs_are_accepted() -> None:
    assert len(CONFIGS) >= 150
    assert REFUSED.keys() <= CONFIGS.keys()
    assert len(REFUSED) < 0.4 * len(CONFIGS)


@pytest.mark.parametrize("checkpoint", [name for name in CONFIGS if name not in REFUSED])
def test_a_published_config_is_accepted(checkpoint: str) -> None:
    assert read(CONFIGS[checkpoint]).num_params > 20_000_000


def read(config: dict[str, Any]) -> ModelSpec | EncoderSpec:
    family = encoder_of_config(config)
    return spec_from_config(config) if family is None else encoder_spec(family, config)


@pytest.mark.parametrize("checkpoint", REFUSED)
def test_a_published_config_is_refused_for_a_true_reason(checkpoint: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[checkpoint]):
        spec_from_config(CONFIGS[checkpoint])
