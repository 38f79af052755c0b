"""Families with a recurrent state against transformers: equal logits however the tokens are split into steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNormGated

from headrace.errors import ModelError, UnsupportedModelError
from headrace.models import Decoder
from headrace.models.hub_config import spec_from_config
from tests import seeds
from tests.models.test_more_families import TINY, VOCAB_SIZE
from tests.models.test_parity import SCHEDULES, TEXT_LENS, PagedRun, Step, is_gain, load
from tests.tolerances import assert_logits

pytestmark = pytest.mark.parity

CONV = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
MAMBA = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": None}
MAMBA |= {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 12}
FALCON = {"mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 12}
MULTIPLIERS: dict[str, Any] = {
    "lm_head_multiplier": 0.6,
    "embedding_multiplier": 3.0,
    "mlp_multipliers": [0.9, 0.7],
    "key_multiplier": 0.6,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.7, 0.8, 0.9, 1.1, 1.2],
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.6,
}
NEMOTRON = {key: value for key, value in TINY.items() if key != "num_hidden_layers"} | {"head_dim": 8}
NEMOTRON |= {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 12}
NEMOTRON |= {"n_routed_experts": 6, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40}
NEMOTRON |= {"num_experts_per_tok": 3, "routed_scaling_factor": 1.5}
DELTA: dict[str, Any] = {"num_hidden_layers": 3, "head_dim": 16, "layer_types": ["linear_attention"] * 2}
DELTA["layer_types"] += ["full_attention"]
DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXPERTS |= {"shared_expert_intermediate_size": 40}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
VISION |= {"num_position_embeddings": 16}
SIGLIP = {"model_type": "siglip2_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
SIGLIP |= {"num_hidden_layers": 1, "num_patches": 16, "patch_size": 4}


def grouped(config: transformers.Mamba2Config) -> transformers.Mamba2ForCausalLM:
    """Builds a Mamba 2 that norms each group of heads, as mamba_ssm does; transformers norms all of them together."""
    model = transformers.Mamba2ForCausalLM(config)
    size = config.num_heads * config.head_dim
    for layer in model.backbone.layers:
        layer.mixer.norm = NemotronHRMSNormGated(size, size // config.n_groups, eps=config.layer_norm_epsilon)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "lfm2": lambda: transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**TINY | CONV)),
    "lfm2, biased, width as stated": lambda: transformers.Lfm2ForCausalLM(
        transformers.Lfm2Config(**TINY | CONV, conv_bias=True, conv_L_cache=4, block_auto_adjust_ff_dim=False)
    ),
    "lfm2, of a model that takes images": lambda: transformers.Lfm2VlForConditionalGeneration(
        transformers.Lfm2VlConfig(text_config=TINY | CONV | {"model_type": "lfm2"}, vision_config=SIGLIP)
    ),
    "mamba 2": lambda: grouped(transformers.Mamba2Config(**MAMBA)),
    "mamba 2, biased, tied": lambda: grouped(
        transformers.Mamba2Config(**MAMBA, use_bias=True, use_conv_bias=False, tie_word_embeddings=True)
    ),
    "falcon-h1": lambda: transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**TINY, **FALCON, **MULTIPLIERS)),
    "falcon-h1, normed after the gate": lambda: transformers.FalconH1ForCausalLM(
        transformers.FalconH1Config(**TINY, **FALCON, mamba_rms_norm=True, mamba_norm_before_gate=False)
    ),
    "falcon-h1, normed before the gate": lambda: transformers.FalconH1ForCausalLM(
        transformers.FalconH1Config(**TINY, **FALCON, mamba_rms_norm=True, mamba_conv_bias=False)
    ),
    "nemotron-h": lambda: transformers.NemotronHForCausalLM(
        transformers.NemotronHConfig(
            **NEMOTRON, layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]
        )
    ),
    "nemotron-h, biased, an mlp last": lambda: transformers.NemotronHForCausalLM(
        transformers.NemotronHConfig(
            **NEMOTRON,
            layers_block_type=["linear_attention", "full_attention", "mlp"],
            use_bias=True,
            mlp_bias=True,
        )
    ),
    "qwen3-next": lambda: transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**TINY | DELTA, **EXPERTS)),
    "qwen3-next, a dense layer": lambda: transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(**TINY | DELTA, **EXPERTS, mlp_only_layers=[1], norm_topk_prob=False)
    ),
    "qwen3.5": lambda: transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**TINY | DELTA)),
    "qwen3.5 moe": lambda: transformers.Qwen3_5MoeForCausalLM(
        transformers.Qwen3_5MoeTextConfig(**TINY | DELTA, **EXPERTS)
    ),
    "qwen3.5, of a model that takes images": lambda: transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(text_config=TINY | DELTA, vision_config=VISION)
    ),
}
LIKE_OTHERS = {
    "mamba 2, biased, tied",
    "falcon-h1, normed after the gate",
    "falcon-h1, normed before the gate",
    "nemotron-h, biased, an mlp last",
    "qwen3-next, a dense layer",
    "qwen3.5 moe",
    "qwen3.5, of a model that takes images",
    "lfm2, biased, width as stated",
    "lfm2, of a model that takes images",
}


def build(name: str) -> Any:
    torch.manual_seed(seeds.seed_of(name))
    model = MODELS[name]().float().eval()
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            parameter.normal_(1.0 if is_gain(each) else 0.0, 0.2)
        for each, buffer in model.named_buffers():
            if each.endswith("correction_bias"):
                buffer.normal_(0.0, 0.3)
    return model


def check(model: Any, ours: Decoder, schedule: list[Step]) -> None:
    texts = [torch.randint(VOCAB_SIZE, (length,)) for length in TEXT_LENS]
    run = PagedRun(ours, texts)
    for step in schedule:
        run.step(step)
    for text, parts in zip(texts, run.logits, strict=True):
        if parts:
            assert assert_logits(torch.cat(parts), model, text).std() > 0.3


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LIKE_OTHERS)) for name in MODELS]
)
def test_logits_equal_transformers_in_chunks_and_mixed_batches(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    check(model, load(tmp_path), SCHEDULES["mixed batches"])


@pytest.mark.parametrize("name", ["mamba 2", pytest.param("qwen3.5", marks=pytest.mark.slow)])
def test_a_prompt_longer_than_a_chunk_of_the_kernels_equals_transformers(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    text = torch.randint(VOCAB_SIZE, (96,))
    run = PagedRun(load(tmp_path), [text])
    run.step([(0, 96)])
    assert_logits(run.logits[0][0], model, text)


@pytest.mark.parametrize("name", ["lfm2", "mamba 2"])
def test_a_sequence_that_starts_again_does_not_read_the_state_of_its_slot(name: str, tmp_path: Path) -> None:
    """After a preemption, or when another sequence takes the slot."""
    model = build(name)
    model.save_pretrained(tmp_path)
    texts = [torch.randint(VOCAB_SIZE, (20,)) for _ in range(2)]
    run = PagedRun(load(tmp_path), texts)
    run.step([(0, 9)])
    run.done, run.texts, run.logits = [0, 0], texts[::-1], [[], []]
    run.step([(0, 1)])
    run.step([(0, 19)])
    assert_logits(torch.cat(run.logits[0]), model, texts[1])


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        ("lfm2", {"layer_types": ["conv", "window"] * 2}, UnsupportedModelError, "conv, full_attention for each of 3"),
        ("mamba 2", {"time_step_limit": [0.0, 0.1]}, UnsupportedModelError, "time_step_limit"),
        ("mamba 2", {"n_groups": 3}, ModelError, "8 heads of a state space cannot be divided into 3 groups"),
        ("mamba 2", {"conv_kernel": 1}, UnsupportedModelError, "a convolution over 1 token"),
        ("falcon-h1", {"mamba_proj_bias": True}, UnsupportedModelError, "mamba_proj_bias=True"),
        ("falcon-h1", {"mamba_d_head": 9}, ModelError, "6 heads of 9 are not mamba_d_ssm=48"),
        ("nemotron-h", {"mlp_hidden_act": "silu"}, UnsupportedModelError, "mlp_hidden_act 'silu'"),
        ("nemotron-h", {"moe_latent_size": 16}, UnsupportedModelError, "moe_latent_size=16"),
        ("qwen3.5", {"linear_num_value_heads": 5}, ModelError, "5 value heads cannot share 2 key heads"),
        ("qwen3.5", {"attn_output_gate": False}, UnsupportedModelError, "attn_output_gate=False"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    name: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = MODELS[name]()
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    with pytest.raises(error, match=message):
        spec_from_config(config | changes)


@pytest.mark.slow
def test_stacks_of_experts_as_qwen_3_5_is_published_are_read(tmp_path: Path) -> None:
    """transformers writes one tensor per expert, the published checkpoints have one for all."""
    model = build("qwen3.5 moe")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = {
            part: torch.stack([tensors.pop(f"{prefix}{expert}.{part}_proj.weight") for expert in range(4)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{prefix}gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        tensors[f"{prefix}down_proj"] = parts["down"]
    save_file({"mtp.fc.weight": torch.ones(2, 2), **tensors}, tmp_path / "model.safetensors")
    check(model, load(tmp_path), SCHEDULES["one prefill"])
