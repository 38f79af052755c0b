"""Rotary frequencies against transformers, for every kind of scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.errors import ModelError
from headrace.models.hub_config import read_rope
from headrace.models.rope import cos_sin_table, head_order, inverse_frequencies, query_scales
from headrace.models.spec import QueryGrowth, RopeSpec

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

LONGROPE = {"short_factor": [1 + 0.01 * i for i in range(64)], "long_factor": [1 + 0.5 * i for i in range(64)]}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, **LLAMA3},
        {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, **LLAMA3},
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 16.0,
            **LLAMA3,
            "high_freq_factor": 1.0,
        },  # Llama 4's
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
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 1024, **LONGROPE},
        {"rope_type": "longrope", "rope_theta": 1e4, "factor": 3.0, **LONGROPE},
        {"rope_type": "longrope", "rope_theta": 1e4, "attention_factor": 1.5, **LONGROPE},
    ],
)
@pytest.mark.parametrize("max_len", [1000, 2048, 5000])  # 2048: the config's
@pytest.mark.parametrize("share", [1.0, 0.75])
def test_frequencies_equal_those_of_transformers(parameters: dict[str, Any], max_len: int, share: float) -> None:
    parameters = parameters | {"partial_rotary_factor": share}
    if "short_factor" in parameters:
        parameters |= {key: parameters[key][: int(64 * share)] for key in ("short_factor", "long_factor")}
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=dict(parameters))
    init = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    expected, attention_factor = init(config, torch.device("cpu"), seq_len=max_len)
    rope = read_rope({"rope_parameters": parameters, "max_position_embeddings": config.max_position_embeddings})
    found = inverse_frequencies(rope, int(128 * share), max_len=max_len)
    torch.testing.assert_close(found.float(), expected, rtol=1e-5, atol=0)
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


def test_dimensions_that_do_not_rotate_keep_their_value() -> None:
    table = cos_sin_table(RopeSpec(), head_dim=16, rotary_dim=4, max_len=10, device=torch.device("cpu"))
    cos, sin = table[:, :8], table[:, 8:]
    assert (cos[1:, :2] != 1).all() and (sin[1:, :2] != 0).all()
    assert (cos[:, 2:] == 1).all() and (sin[:, 2:] == 0).all()
    still = cos_sin_table(RopeSpec(kind="none"), head_dim=16, max_len=10, device=torch.device("cpu"))
    assert (still[:, :8] == 1).all() and (still[:, 8:] == 0).all()


def test_queries_grow_with_each_step_of_positions_and_not_within_the_first() -> None:
    growth, device = QueryGrowth(step=4, strength=0.5), torch.device("cpu")
    scales = query_scales(growth, max_len=8, device=device)
    expected = 1 + 0.5 * torch.tensor([1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 3.0]).log()  # one position early, as trained
    torch.testing.assert_close(scales, expected)
    assert query_scales(growth, max_len=3, device=device) is None
    assert query_scales(None, max_len=8, device=device) is None


@pytest.mark.parametrize(
    ("rotary_dim", "rotates_pairs", "order"),
    [
        (None, False, None),
        (8, False, None),
        (4, False, [0, 1, 4, 5, 2, 3, 6, 7]),
        (None, True, [0, 2, 4, 6, 1, 3, 5, 7]),
        (4, True, [0, 2, 4, 5, 1, 3, 6, 7]),
    ],
)
def test_dimensions_that_rotate_together_are_half_a_head_apart(
    rotary_dim: int | None, rotates_pairs: bool, order: list[int] | None
) -> None:
    assert head_order(8, rotary_dim, rotates_pairs=rotates_pairs) == order


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_parameters": [1.0]}, r"rope_parameters must be an object, got \[1.0\]"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        ({"rope_theta": 0}, "rope_theta must be a number above 1, got 0"),
        ({"rope_theta": "x"}, "rope_theta must be a number above 1, got 'x'"),
        ({"rope_parameters": {"rope_theta": [5.0]}}, "rope_theta must be a number above 1"),
        ({"rope_parameters": {"rope_type": ["linear"]}}, "rope type .* is not supported"),
    ],
)
def test_values_of_the_wrong_kind_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_rope(config)
