"""Families whose GGUF files need more than renaming: the logits of the models they were made from.

Tensors are named by the gguf package and rearranged as llama.cpp's converter does it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    ArceeConfig,
    ArceeForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MptConfig,
    MptForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from headrace.errors import ModelError, UnsupportedModelError
from headrace.models import RopeSpec, load_decoder, open_checkpoint
from tests import seeds
from tests.models.test_gguf import SMALL, interleave, logits, write
from tests.models.test_parity import is_gain
from tests.tolerances import assert_logits

pytestmark = pytest.mark.parity

Array = np.ndarray
EPS = 1e-6
DIVISORS = {"short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [2.0 + 0.5 * i for i in range(6)]}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def as_it_is(name: str, weight: Array, model: PreTrainedModel) -> Array:
    return weight


def interleaved_rows(name: str, weight: Array, model: PreTrainedModel) -> Array:
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    part = name.split(".")[-2]
    return interleave(weight, heads[part]) if part in heads else weight


def grown_norms(name: str, weight: Array, model: PreTrainedModel) -> Array:
    return weight + 1 if is_gain(name) else weight


def unturned(name: str, weight: Array, model: PreTrainedModel) -> Array:
    """Transposes the matrices of GPT-2's layers, which are [in, out]."""
    return np.ascontiguousarray(weight.T) if ".c_" in name and weight.ndim == 2 else weight


def by_kind(name: str, weight: Array, model: PreTrainedModel) -> Array:
    """Reorders to all queries, then keys, then values; these families interleave them by key-value head."""
    if "query_key_value" not in name:
        return weight
    config = model.config
    num_kv_heads = getattr(config, "num_kv_heads", None) or config.num_attention_heads
    heads = weight.reshape(num_kv_heads, config.num_attention_heads // num_kv_heads + 2, -1, *weight.shape[1:])
    parts = (heads[:, :-2], heads[:, -2], heads[:, -1])
    return np.concatenate([part.reshape(-1, *weight.shape[1:]) for part in parts])


@dataclass(frozen=True)
class Case:
    architecture: str
    model: Callable[[], PreTrainedModel]
    rearranged: Callable[[str, Array, PreTrainedModel], Array] = as_it_is
    numbers: dict[str, Any] = field(default_factory=dict)  # of the metadata
    extra: dict[str, Any] = field(default_factory=dict)  # keys of the architecture
    tensors: dict[str, Array] = field(default_factory=dict)


FALCON = SMALL | {"ffn_hidden_size": 96, "bos_token_id": None, "eos_token_id": None}
CASES = {
    "bloom": Case(
        "bloom",
        lambda: BloomForCausalLM(BloomConfig(vocab_size=96, hidden_size=96, n_layer=2, n_head=6)),
        by_kind,
        numbers={"layer_norm_eps": 1e-5, "hidden_size": 96, "intermediate_size": 384}
        | {"num_attention_heads": 6, "num_key_value_heads": 6},
    ),
    "mpt": Case(
        "mpt",
        lambda: MptForCausalLM(
            MptConfig(vocab_size=96, d_model=64, n_layers=2, n_heads=4, max_seq_len=128, attn_config={"clip_qkv": 0.7})
        ),
        numbers={"layer_norm_eps": 1e-5, "intermediate_size": 256, "num_key_value_heads": 4},
        extra={"attention.clamp_kqv": 0.7, "attention.max_alibi_bias": 8.0},
    ),
    "falcon 7b": Case(
        "falcon",
        lambda: FalconForCausalLM(FalconConfig(**FALCON, num_kv_heads=1)),
        by_kind,
        numbers={"layer_norm_eps": 1e-5, "num_key_value_heads": 1},
        extra={"tensor_data_layout": "jploski"},
    ),
    "falcon 40b": Case(
        "falcon",
        lambda: FalconForCausalLM(FalconConfig(**FALCON, num_kv_heads=2, new_decoder_architecture=True)),
        by_kind,
        numbers={"layer_norm_eps": 1e-5},
    ),
    "stablelm 2 12b": Case(
        "stablelm",
        lambda: StableLmForCausalLM(StableLmConfig(**SMALL, qk_layernorm=True, use_parallel_residual=True)),
        numbers={"layer_norm_eps": 1e-5},
        extra={"rope.dimension_count": 4, "use_parallel_residual": True},
    ),
    "stablelm 2 1.6b": Case(
        "stablelm",
        lambda: StableLmForCausalLM(StableLmConfig(**SMALL, use_qkv_bias=True)),
        numbers={"layer_norm_eps": 1e-5},
        extra={"rope.dimension_count": 4, "use_parallel_residual": False},
    ),
    "command r+": Case(
        "command-r",
        lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.5, rope_theta=10000.0, use_qk_norm=True)),
        numbers={"layer_norm_eps": 1e-5},
        extra={"logit_scale": 0.5},
    ),
    "seed-oss": Case(
        "seed_oss",
        lambda: SeedOssForCausalLM(SeedOssConfig(**SMALL, head_dim=32)),
        numbers={"head_dim": 32},
    ),
    "ernie 4.5": Case(
        "ernie4_5", lambda: Ernie4_5ForCausalLM(Ernie4_5Config(**SMALL, head_dim=16, rms_norm_eps=EPS, rope_theta=1e4))
    ),
    "exaone 4 1.2b": Case(
        "exaone4",
        lambda: Exaone4ForCausalLM(
            Exaone4Config(**SMALL, sliding_window=None, layer_types=["full_attention"] * 2, rms_norm_eps=EPS)
        ),
    ),
    "exaone 4 32b": Case(
        "exaone4",
        lambda: Exaone4ForCausalLM(
            Exaone4Config(
                **SMALL | {"num_hidden_layers": 4}, sliding_window=8, sliding_window_pattern=4, rms_norm_eps=EPS
            )
        ),
        numbers={"num_hidden_layers": 4},
        extra={
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [True, True, True, False],
        },
    ),
    "nemotron": Case(
        "nemotron",
        lambda: NemotronForCausalLM(NemotronConfig(**SMALL, pad_token_id=None)),
        grown_norms,
        numbers={"layer_norm_eps": 1e-5},
        extra={"rope.dimension_count": 8},
    ),
    "arcee": Case(
        "arcee",
        lambda: ArceeForCausalLM(ArceeConfig(**SMALL, rms_norm_eps=EPS, pad_token_id=None)),
        interleaved_rows,
    ),
    "olmo 1": Case(
        "olmo",
        lambda: OlmoForCausalLM(OlmoConfig(**SMALL, clip_qkv=0.5, pad_token_id=None)),
        interleaved_rows,
        numbers={"layer_norm_eps": 1e-5},
        extra={"attention.clamp_kqv": 0.5},
    ),
    "starcoder": Case(
        "starcoder",
        lambda: GPTBigCodeForCausalLM(GPTBigCodeConfig(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=128)),
        numbers={"layer_norm_eps": 1e-5, "num_key_value_heads": 1, "intermediate_size": 256},
    ),
    "internlm 2": Case(
        "internlm2",
        lambda: LlamaForCausalLM(LlamaConfig(**SMALL, rms_norm_eps=EPS, pad_token_id=None)),
        interleaved_rows,
    ),
    "qwen2.5-vl": Case(
        "qwen2vl",
        lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, rms_norm_eps=EPS)),
        extra={"rope.dimension_sections": [2, 3, 3, 0]},
    ),
    "qwen3-vl": Case(
        "qwen3vl",
        lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, rms_norm_eps=EPS, head_dim=32)),
        numbers={"head_dim": 32},
        extra={"rope.dimension_sections": [6, 5, 5, 0], "n_deepstack_layers": 3},
    ),
    "phi 3": Case(
        "phi3",
        lambda: Phi3ForCausalLM(Phi3Config(**SMALL, rms_norm_eps=EPS, sliding_window=8, pad_token_id=None)),
        extra={"attention.sliding_window": 8, "rope.dimension_count": 16},
    ),
    "phi 4 mini": Case(
        "phi3",
        lambda: Phi3ForCausalLM(
            Phi3Config(
                **SMALL,
                rms_norm_eps=EPS,
                pad_token_id=None,
                original_max_position_embeddings=8,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.75,
                    **DIVISORS,
                },
            )
        ),
        extra={
            "attention.sliding_window": 0,
            "rope.dimension_count": 12,
            "rope.scaling.original_context_length": 8,
            "rope.scaling.attn_factor": (1 + np.log(16) / np.log(8)) ** 0.5,
        },
        tensors={
            f"rope_factors_{length}.weight": np.array(DIVISORS[f"{length}_factor"], np.float32)
            for length in ("short", "long")
        },
    ),
    "granite": Case(
        "granite",
        lambda: GraniteForCausalLM(
            GraniteConfig(
                **SMALL,
                embedding_multiplier=12.0,
                residual_multiplier=0.25,
                attention_multiplier=0.1,
                logits_scaling=2.0,
            )
        ),
        interleaved_rows,
        extra={"embedding_scale": 12.0, "residual_scale": 0.25, "attention.scale": 0.1, "logit_scale": 2.0},
    ),
    "olmo 2": Case("olmo2", lambda: Olmo2ForCausalLM(Olmo2Config(**SMALL, rms_norm_eps=EPS, pad_token_id=None))),
    "olmo 3": Case(
        "olmo2",
        lambda: Olmo3ForCausalLM(
            Olmo3Config(
                **SMALL | {"num_hidden_layers": 4},
                rms_norm_eps=EPS,
                pad_token_id=None,
                sliding_window=8,
                layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
                rope_parameters={
                    "full_attention": {"rope_theta": 10000.0, **YARN},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
            )
        ),
        numbers={"num_hidden_layers": 4},
        extra={
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [True, False, False, True],
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_attn_factor": 0.1 * np.log(4.0) + 1.0,
        },
    ),
    "glm": Case(
        "chatglm",
        lambda: GlmForCausalLM(GlmConfig(**SMALL, rms_norm_eps=EPS, head_dim=16, pad_token_id=None)),
        extra={"rope.dimension_count": 8},
    ),
    "glm 4": Case(
        "glm4",
        lambda: Glm4ForCausalLM(Glm4Config(**SMALL, rms_norm_eps=EPS, head_dim=32, pad_token_id=None)),
        numbers={"head_dim": 32},
        extra={"rope.dimension_count": 16},
    ),
    "smollm 3": Case(
        "smollm3",
        lambda: SmolLM3ForCausalLM(
            SmolLM3Config(**SMALL | {"num_hidden_layers": 4}, rope_theta=10000.0, pad_token_id=None)
        ),
        interleaved_rows,
        numbers={"num_hidden_layers": 4},
    ),
    "starcoder 2": Case(
        "starcoder2",
        lambda: Starcoder2ForCausalLM(Starcoder2Config(**SMALL)),
        numbers={"layer_norm_eps": 1e-5},
    ),
    "gpt-neox": Case(
        "gptneox",
        lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL | {"num_key_value_heads": None})),
        by_kind,
        numbers={"layer_norm_eps": 1e-5, "num_key_value_heads": 4},
        extra={"rope.dimension_count": 4, "use_parallel_residual": True},
    ),
    "gpt-neox, one half after the other": Case(
        "gptneox",
        lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL | {"num_key_value_heads": None}, use_parallel_residual=False)),
        by_kind,
        numbers={"layer_norm_eps": 1e-5, "num_key_value_heads": 4},
        extra={"rope.dimension_count": 4, "use_parallel_residual": False},
    ),
    "gpt-2": Case(
        "gpt2",
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=128)),
        unturned,
        numbers={"layer_norm_eps": 1e-5, "num_key_value_heads": 4, "intermediate_size": 256},
    ),
    "phi 2": Case(
        "phi2",
        lambda: PhiForCausalLM(PhiConfig(**SMALL)),
        numbers={"layer_norm_eps": 1e-5},
        extra={"rope.dimension_count": 8},
    ),
    "cohere": Case(
        "command-r",
        lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.5, rope_theta=10000.0)),
        numbers={"layer_norm_eps": 1e-5},
        extra={"logit_scale": 0.5, "rope.scaling.type": "none"},
    ),
    "cohere 2": Case(
        "cohere2",
        lambda: Cohere2ForCausalLM(
            Cohere2Config(**SMALL | {"num_hidden_layers": 4}, logit_scale=0.5, rope_theta=10000.0, sliding_window=8)
        ),
        numbers={"layer_norm_eps": 1e-5, "num_hidden_layers": 4},
        extra={
            "logit_scale": 0.5,
            "rope.scaling.type": "none",
            "rope.dimension_count": 16,
            "attention.sliding_window": 8,
        },
    ),
}


def make(case: Case) -> PreTrainedModel:
    torch.manual_seed(seeds.seed_of(case.architecture))
    model = case.model().float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if is_gain(name) else 0.0, 0.2)
    return model


def tensors_of(case: Case, model: PreTrainedModel, weights: dict[str, torch.Tensor] | None = None) -> dict[str, Array]:
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[case.architecture]
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    tensors = dict(case.tensors)
    for name, tensor in joined_norms(weights or model.state_dict()).items():
        stem, _, kind = name.rpartition(".")
        if name != "lm_head.weight" or not model.config.tie_word_embeddings:
            known = names.get_name(stem) or names.get_name(stem.removeprefix("transformer."))
            tensors[f"{known}.{kind}"] = case.rearranged(name, tensor.numpy(), model)
    return tensors


def joined_norms(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stacks the norms of StableLM's heads, as a file has them."""
    joined: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        whole, is_of_head, _ = name.partition(".norms.")
        if is_of_head:
            joined[f"{whole}.weight"] = torch.cat(
                (joined.get(f"{whole}.weight", tensor.new_empty(0, len(tensor))), tensor[None])
            )
        else:
            joined[name] = tensor
    return joined


def save(case: Case, model: PreTrainedModel, path: Path, tensors: dict[str, Array] | None = None, **extra: Any) -> str:
    keys = {key: value for key, value in (case.extra | extra).items() if value is not None}
    values = {f"{case.architecture}.{key}": value for key, value in keys.items()}
    tensors = tensors_of(case, model) if tensors is None else tensors
    return str(write(path / "model.gguf", tensors, architecture=case.architecture, extra=values, **case.numbers))


# What the others show too is left to the slow tests.
LIKE_OTHERS = ("mpt", "falcon 7b", "stablelm 2 1.6b", "command r+", "ernie 4.5", "exaone 4 1.2b", "exaone 4 32b")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LIKE_OTHERS)) for name in CASES]
)
def test_a_gguf_file_gives_the_logits_of_the_model_it_was_made_from(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    theirs = make(case)
    checkpoint = open_checkpoint(save(case, theirs, tmp_path))
    text = torch.arange(40)
    expected = assert_logits(logits(load_decoder(checkpoint, dtype=torch.float32), text), theirs, text)
    assert expected.std() > 0.5


def test_a_fused_matrix_of_the_wrong_height_is_named(tmp_path: Path) -> None:
    case = CASES["phi 3"]
    model = make(case)
    model.model.layers[1].self_attn.qkv_proj.weight = torch.nn.Parameter(torch.ones(96, 64))
    checkpoint = open_checkpoint(save(case, model, tmp_path))
    with pytest.raises(ModelError, match=r"'blk.1.attn_qkv.weight' has shape \[96, 64\]; its config implies 128 rows"):
        load_decoder(checkpoint, dtype=torch.float32)


def test_the_fused_matrices_of_a_chatglm_file_are_taken_apart(tmp_path: Path) -> None:
    """Files made from the first checkpoints of GLM-4 have queries, keys and values in one."""
    case = CASES["glm"]
    model = make(case)
    tensors = tensors_of(case, model)
    for layer, kind in itertools.product(range(2), ("weight", "bias")):
        parts = [tensors.pop(f"blk.{layer}.attn_{part}.{kind}") for part in "qkv"]
        tensors[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(parts)
    values = {f"chatglm.{key}": value for key, value in case.extra.items()}
    fused = open_checkpoint(str(write(tmp_path / "fused.gguf", tensors, architecture="chatglm", extra=values)))
    plain = dict(open_checkpoint(save(case, model, tmp_path)).tensors())
    assert plain.keys() == dict(fused.tensors()).keys()
    for name, tensor in fused.tensors():
        torch.testing.assert_close(tensor, plain[name], atol=0, rtol=0)


def test_an_olmo_3_file_may_omit_its_pattern_and_state_the_rope_of_its_windows(tmp_path: Path) -> None:
    case = CASES["olmo 3"]
    changes = {"attention.sliding_window_pattern": None, "rope.freq_base_swa": 500.0}
    spec = open_checkpoint(save(case, make(case), tmp_path, **changes)).spec
    assert (spec.family, spec.windows) == ("olmo3", (8, 8, 8, None))
    assert spec.local_rope == RopeSpec(theta=500.0)


def test_another_attention_factor_than_yarn_implies_is_refused(tmp_path: Path) -> None:
    case = CASES["olmo 3"]
    path = save(case, make(case), tmp_path, **{"rope.scaling.yarn_attn_factor": 1.0})
    with pytest.raises(UnsupportedModelError, match=r"yarn_attn_factor=1\.0"):
        open_checkpoint(path)
