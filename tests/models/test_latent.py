"""Multi-head latent attention: what the cache holds, the order of dimensions, what is refused. Parity is in
test_more_families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ModelError, UnsupportedModelError
from headrace.models.hub_config import spec_from_config
from headrace.models.latent import rotary_order
from headrace.models.spec import LatentSpec
from tests.models.test_more_families import LATENT, TINY, build
from tests.models.test_parity import load

CONFIG = TINY | LATENT | {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "greedy"}


def test_pairs_that_rotate_are_put_half_apart() -> None:
    latent = LatentSpec(query_rank=None, kv_rank=8, still_dim=4, rotary_dim=6, value_dim=4)
    assert rotary_order(latent, rotates_pairs=True) == [0, 2, 4, 1, 3, 5]
    assert rotary_order(latent, rotates_pairs=False) == [0, 1, 2, 3, 4, 5]


def test_a_token_takes_one_latent_and_one_rotated_part_in_the_cache(tmp_path: Path) -> None:
    build("deepseek v3").save_pretrained(tmp_path)
    decoder = load(tmp_path)
    cache = decoder.allocate_cache(3, 4)
    assert cache.keys.shape == (3, 1, 4, 24 + 8)
    assert cache.values.shape == (3, 1, 4, 24)
    assert cache.values.data_ptr() == cache.keys.data_ptr()
    assert decoder.spec.kv_elements_per_token == 2 * (24 + 8)


def test_values_may_be_longer_than_keys() -> None:
    spec = spec_from_config(CONFIG | {"v_head_dim": 30})
    assert spec.latent is not None and spec.latent.value_dim == 30


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"qk_rope_head_dim": 7, "qk_nope_head_dim": 13}, ModelError, "qk_rope_head_dim must be even"),
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias=True"),
        ({"topk_method": "noaux_tc"}, UnsupportedModelError, "'noaux_tc' is not supported for DeepSeek V2"),
        ({"topk_method": "group_limited_greedy", "n_group": 4}, ModelError, "6 experts cannot be chosen from 2 of 4"),
        ({"quantization_config": {"quant_method": "modelopt"}}, UnsupportedModelError, r"quantized \(modelopt\)"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        spec_from_config(CONFIG | {"n_group": 3, "topk_group": 2} | changes)
