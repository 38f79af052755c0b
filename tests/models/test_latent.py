"""Multi-head latent attention: the order of dimensions, and what is refused. Parity is in test_more_families."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import ModelError, UnsupportedModelError
from headrace.models.hub_config import spec_from_config
from headrace.models.latent import latent_head_order
from headrace.models.spec import LatentSpec
from tests.models.test_more_families import LATENT, TINY


def test_each_half_of_a_head_starts_with_what_rotates() -> None:
    latent = LatentSpec(query_rank=None, kv_rank=8, still_dim=4, rotary_dim=4, value_dim=4)
    assert latent_head_order(latent, rotates_pairs=True) == [4, 6, 0, 1, 5, 7, 2, 3]
    assert latent_head_order(latent, rotates_pairs=False) == [4, 5, 0, 1, 6, 7, 2, 3]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"v_head_dim": 30}, UnsupportedModelError, "values of 30 are not supported"),
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias=True"),
        ({"topk_method": "noaux_tc"}, UnsupportedModelError, "'noaux_tc' is not supported for DeepSeek V2"),
        ({"n_group": 4}, ModelError, "6 experts cannot be chosen from 2 of 4 equal groups"),
        ({"quantization_config": {"quant_method": "modelopt"}}, UnsupportedModelError, r"quantized \(modelopt\)"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = TINY | LATENT | {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "group_limited_greedy"}
    with pytest.raises(error, match=message):
        spec_from_config(config | {"n_group": 3, "topk_group": 2} | changes)
