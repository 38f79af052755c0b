"""Rotary frequencies against transformers, for every kind of stretching."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.models.hub_config import read_rope
from headrace.models.rope import cos_sin_table, inverse_frequencies
from headrace.models.spec import RopeSpec

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, **LLAMA3},
        {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, **LLAMA3},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 40.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "beta_fast": 16.0,
        },
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False, "attention_factor": 1.2},
    ],
)
def test_frequencies_equal_those_of_transformers(parameters: dict[str, Any]) -> None:
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=dict(parameters))
    expected, attention_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    rope = read_rope({"rope_parameters": parameters, "max_position_embeddings": config.max_position_embeddings})
    torch.testing.assert_close(inverse_frequencies(rope, 128).float(), expected, rtol=1e-5, atol=0)
    assert rope.attention_factor == pytest.approx(attention_factor)


def test_the_older_pair_of_rope_theta_and_rope_scaling_reads_as_the_newer_parameters() -> None:
    scaling = {"type": "linear", "factor": 2.0}
    older = read_rope({"rope_theta": 5000.0, "rope_scaling": scaling})
    assert older == read_rope({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}})
    assert read_rope({"rope_theta": 5000.0, "rope_scaling": None}) == RopeSpec(theta=5000.0)


def test_a_long_table_is_exact_at_its_far_end() -> None:
    table = cos_sin_table(RopeSpec(theta=500_000.0), head_dim=8, max_len=100_000, device=torch.device("cpu"))
    angles = torch.tensor(99_999, dtype=torch.float64) * 500_000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    torch.testing.assert_close(table[-1], torch.cat((angles.cos(), angles.sin())).float(), atol=1e-7, rtol=0)
    assert table.shape == (100_000, 8)
