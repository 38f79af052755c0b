"""Multi-head latent attention on several ranks, and what is refused. Parity of one rank is in test_more_families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.dist.collectives import TensorGroup
from headrace.errors import ModelError, UnsupportedModelError
from headrace.models.hub_config import spec_from_config
from headrace.models.latent import latent_head_order
from headrace.models.spec import LatentSpec
from tests.dist.ranks import on_ranks
from tests.models.test_more_families import build
from tests.models.test_parity import SCHEDULES, TEXT_LENS, PagedRun
from tests.models.test_sharded_decoder import load_part
from tests.tolerances import assert_logits

pytestmark = pytest.mark.parity


@pytest.mark.parametrize(
    ("name", "size"),
    [("deepseek v3", 2), *(pytest.param("deepseek v2-lite", n, marks=pytest.mark.slow) for n in (2, 3))],
)
def test_ranks_have_whole_latents_and_their_heads(name: str, size: int, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    texts = [torch.randint(96, (length,)) for length in TEXT_LENS]

    def run(group: TensorGroup) -> PagedRun:
        run = PagedRun(load_part(tmp_path, group), texts)
        for step in SCHEDULES["mixed batches"]:
            run.step(step)
        return run

    for each in on_ranks(size, run):
        for text, parts in zip(texts, each.logits, strict=True):
            assert_logits(torch.cat(parts), model, text)


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
        ({"quantization_config": {"quant_method": "fp8"}}, UnsupportedModelError, r"quantized \(fp8\)"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = build("deepseek v2").config.to_dict() | {"architectures": ["DeepseekV2ForCausalLM"]}
    with pytest.raises(error, match=message):
        spec_from_config(config | changes)
