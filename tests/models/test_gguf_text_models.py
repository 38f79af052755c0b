"""GGUF files of the text models of multimodal checkpoints, and of InternLM 3, which is stored as a Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from headrace.models import load_decoder, open_checkpoint
from tests.models.test_gguf import SMALL, logits
from tests.models.test_gguf_families import EPS, Case, interleaved_rows, make, save, tensors_of
from tests.models.test_more_families import GEMMA3N, MINISTRAL3_ROPE
from tests.tolerances import assert_logits

pytestmark = pytest.mark.parity

COMMON: dict[str, Any] = SMALL | {"rms_norm_eps": EPS, "pad_token_id": None}
YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}


def ministral3(rope: dict[str, Any], extra: dict[str, Any]) -> Case:
    config = Ministral3Config(**COMMON, head_dim=32, rope_parameters=MINISTRAL3_ROPE | {"rope_theta": 10000.0} | rope)
    return Case(
        "mistral3", lambda: Ministral3ForCausalLM(config), interleaved_rows, {"head_dim": 32}, YARN_KEYS | extra
    )


CASES = {
    "mistral small 3.1": Case(
        "mistral3",
        lambda: MistralForCausalLM(MistralConfig(**COMMON, head_dim=32, sliding_window=None, rope_theta=10000.0)),
        interleaved_rows,
        {"head_dim": 32},
        {"rope.dimension_count": 32},
    ),
    "ministral 3": ministral3({}, {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.3}),
    "ministral 3, cosines and sines scaled": ministral3(
        {"mscale_all_dim": 0.5}, {"rope.scaling.yarn_log_multiplier": 0.5, "attention.temperature_scale": 0.3}
    ),
    "internlm 3": Case(
        "llama",
        lambda: LlamaForCausalLM(LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True)),
        interleaved_rows,
    ),
}


def check(path: str, theirs: Any) -> None:
    text = torch.arange(40)
    ours = load_decoder(open_checkpoint(path), dtype=torch.float32)
    assert assert_logits(logits(ours, text), theirs, text).std() > 0.5


@pytest.mark.parametrize("name", CASES)
def test_a_file_gives_the_logits_of_the_model_it_was_made_from(name: str, tmp_path: Path) -> None:
    theirs = make(CASES[name])
    check(save(CASES[name], theirs, tmp_path), theirs)


def gemma3n() -> Gemma3nForCausalLM:
    return Gemma3nForCausalLM(Gemma3nTextConfig(**COMMON | GEMMA3N))


GEMMA3N_CASE = Case(
    "gemma3n",
    gemma3n,
    numbers={"num_hidden_layers": 6, "head_dim": 16, "rope_theta": 1_000_000.0},
    extra={
        "altup.active_idx": 0,
        "altup.num_inputs": 4,
        "embedding_length_per_layer_input": 8,
        "attention.shared_kv_layers": 2,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in GEMMA3N["layer_types"]],
        "final_logit_softcapping": 30.0,
    },
)


def gemma3n_tensors(model: Gemma3nForCausalLM) -> dict[str, np.ndarray]:
    """The matrices between streams are stacked, and layers without keys and values have tensors for them."""
    weights = dict(model.state_dict())
    stacks = {
        stored: np.stack([weights.pop(f"model.{name}.{i}.weight").numpy() for i in range(3)])
        for stored, name in (
            ("altup_proj.weight", "altup_projections"),
            ("altup_unembd_proj.weight", "altup_unembed_projections"),
        )
    }
    scales = {name: f"{name}.weight" for name in weights if name.endswith("_scale")}
    renamed = {scales.get(name, name): tensor for name, tensor in weights.items()}
    unused = {f"blk.5.attn_{part}.weight": np.ones((32, 64), np.float32) for part in "kv"}
    return stacks | unused | tensors_of(GEMMA3N_CASE, model, renamed)


def test_a_gemma_3n_file_gives_the_logits_of_the_model_it_was_made_from(tmp_path: Path) -> None:
    theirs = make(GEMMA3N_CASE)
    limits = torch.distributions.Normal(0, 1).icdf(torch.tensor(GEMMA3N["activation_sparsity_pattern"]))
    tensors = gemma3n_tensors(theirs)
    path = save(GEMMA3N_CASE, theirs, tmp_path, tensors, activation_sparsity_scale=limits.tolist())
    check(path, theirs)
    spec = open_checkpoint(path).spec
    assert [spec.kv_source(layer) for layer in range(6)] == [None, None, None, None, 3, 2]
