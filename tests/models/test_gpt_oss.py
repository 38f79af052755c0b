"""gpt-oss: its experts in MXFP4, and its parts on several ranks. Parity of plain weights is in test_more_families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.errors import ModelError, UnsupportedModelError
from headrace.models import open_checkpoint
from headrace.models.hub_config import spec_from_config
from headrace.models.weights.mxfp4 import dequantize
from tests.models.test_more_families import GPT_OSS, TINY, build, check
from tests.models.test_sharded_decoder import check_logits

pytestmark = pytest.mark.parity
MODEL_FILE = "model.safetensors"


def random_blocks(stack: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and scales of a stack [E, K, N] of this shape, as the published files have them."""
    num_experts, num_columns, num_rows = stack.shape
    blocks = torch.randint(256, (num_experts, num_rows, num_columns // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(122, 125, blocks.shape[:-1], dtype=torch.uint8)


def save_in_mxfp4(directory: Path) -> transformers.PreTrainedModel:
    """Saves the checkpoint, and returns the model with the weights that transformers reads from the same blocks."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = build("gpt-oss")
    model.save_pretrained(directory)
    tensors, state = load_file(directory / MODEL_FILE), model.state_dict()
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = random_blocks(tensors.pop(name))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        state[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, directory / MODEL_FILE)
    config = json.loads((directory / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return model


def test_experts_in_mxfp4_are_dequantized_at_load(tmp_path: Path) -> None:
    model = save_in_mxfp4(tmp_path)
    check(model, tmp_path)
    ours = open_checkpoint(str(tmp_path)).tensor("model.layers.1.mlp.experts.2.down_proj.weight")
    assert torch.equal(ours, model.state_dict()["model.layers.1.mlp.experts.down_proj"][2].t())


@pytest.mark.parametrize(
    ("size", "whole_experts"), [(2, False), (2, True), pytest.param(3, False, marks=pytest.mark.slow)]
)
def test_ranks_have_the_sinks_of_their_heads_and_their_part_of_the_experts(
    size: int, whole_experts: bool, tmp_path: Path
) -> None:
    check_logits(tmp_path, save_in_mxfp4(tmp_path), size, whole_experts=whole_experts)


def test_every_value_of_fp4_is_scaled_by_a_power_of_two() -> None:
    blocks = torch.arange(0, 256, 17, dtype=torch.uint8).view(1, 1, 16)  # both halves of byte i are i
    values = dequantize(blocks, torch.tensor([[128]], dtype=torch.uint8))
    positive = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]
    assert values[0, ::2].tolist() == values[0, 1::2].tolist() == positive + [-each for each in positive]


def test_blocks_and_scales_that_do_not_fit_are_named(tmp_path: Path) -> None:
    save_in_mxfp4(tmp_path)
    tensors = load_file(tmp_path / MODEL_FILE)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, tmp_path / MODEL_FILE)
    with pytest.raises(ModelError, match=r"down_proj' in MXFP4 .*\[4, 32, 2, 16\] .*\[4, 31, 2\]"):
        check(build("gpt-oss"), tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit 5.0"),
        ({"quantization_config": {"quant_method": "modelopt"}}, r"quantized \(modelopt\)"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(changes: dict[str, Any], message: str) -> None:
    config = TINY | GPT_OSS | {"architectures": ["GptOssForCausalLM"]}
    with pytest.raises(UnsupportedModelError, match=message):
        spec_from_config(config | changes)
