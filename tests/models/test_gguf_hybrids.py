"""Hybrids and DeepSeek from GGUF files, named and arranged as llama.cpp's converter does it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from headrace.dist.collectives import TensorGroup
from headrace.errors import ModelError, UnsupportedModelError
from headrace.models import load_decoder, open_checkpoint
from tests.dist.ranks import on_ranks
from tests.models import test_hybrids as hybrids
from tests.models import test_more_families as families
from tests.models.test_gguf import Types, logits, write
from tests.tolerances import assert_logits

pytestmark = pytest.mark.parity

Tensors = dict[str, np.ndarray]
CONTEXT = 128
SSM = {"ssm.conv_kernel": 4, "ssm.state_size": 12, "ssm.group_count": 2}
MAMBA_KEYS = SSM | {"ssm.inner_size": 64, "ssm.time_step_rank": 8}
DELTA_KEYS = {"ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 2, "ssm.inner_size": 72}
DELTA_KEYS |= {"ssm.time_step_rank": 6, "full_attention_interval": 3, "rope.dimension_count": 4}
EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}
EXPERT_KEYS |= {"expert_shared_feed_forward_length": 40}
LATENT_KEYS: dict[str, Any] = {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 24}
LATENT_KEYS |= {"expert_shared_count": 2, "leading_dense_block_count": 1, "attention.kv_lora_rank": 24}
LATENT_KEYS |= {"attention.q_lora_rank": 20, "attention.key_length": 32, "attention.value_length": 24}
LATENT_KEYS |= {"attention.key_length_mla": 20, "attention.value_length_mla": 10, "rope.dimension_count": 8}
YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}


@dataclass(frozen=True)
class Case:
    architecture: str
    model: Callable[[], Any]
    extra: dict[str, Any]  # keys of the architecture
    numbers: dict[str, Any] = field(default_factory=dict)  # of the metadata


def hybrid(name: str) -> Callable[[], Any]:
    return lambda: hybrids.build(name)


def family(name: str) -> Callable[[], Any]:
    return lambda: families.build(name)


CASES = {
    "lfm2": Case(
        "lfm2",
        hybrid("lfm2"),
        {"shortconv.l_cache": 3},
        {"num_key_value_heads": [0, 2, 0], "intermediate_size": 256},
    ),
    "mamba 2": Case(
        "mamba2",
        hybrid("mamba 2"),
        MAMBA_KEYS,
        {"intermediate_size": 0, "num_attention_heads": 0, "max_position_embeddings": 1 << 20},
    ),
    "falcon-h1": Case(
        "falcon-h1", hybrid("falcon-h1"), SSM | {"ssm.inner_size": 48, "ssm.time_step_rank": 6}, {"head_dim": 8}
    ),
    "falcon-h1, normed after the gate": Case(
        "falcon-h1",
        hybrid("falcon-h1, normed after the gate"),
        SSM | {"ssm.inner_size": 48, "ssm.time_step_rank": 6},
        {"head_dim": 8},
    ),
    "nemotron-h": Case(
        "nemotron_h",
        hybrid("nemotron-h, biased, an mlp last"),
        MAMBA_KEYS,
        {"head_dim": 8, "num_key_value_heads": [0, 2, 0], "intermediate_size": [0, 0, 48]},
    ),
    "nemotron-h moe": Case(
        "nemotron_h_moe",
        hybrid("nemotron-h"),
        MAMBA_KEYS
        | {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 24, "expert_shared_count": 1}
        | {"expert_shared_feed_forward_length": 40, "expert_weights_norm": True, "expert_weights_scale": 1.5}
        | {"expert_group_count": 1, "expert_group_used_count": 1},
        {"head_dim": 8, "num_key_value_heads": [0, 0, 2, 0, 0], "intermediate_size": 48},
    ),
    "qwen3-next": Case("qwen3next", hybrid("qwen3-next"), DELTA_KEYS | EXPERT_KEYS, {"head_dim": 16}),
    "qwen3.5": Case(
        "qwen35", hybrid("qwen3.5"), DELTA_KEYS | {"rope.dimension_sections": [1, 1, 0, 0]}, {"head_dim": 16}
    ),
    "qwen3.5 moe": Case("qwen35moe", hybrid("qwen3.5 moe"), DELTA_KEYS | EXPERT_KEYS, {"head_dim": 16}),
    "deepseek v2-lite": Case(
        "deepseek2",
        family("deepseek v2-lite"),
        {key: value for key, value in LATENT_KEYS.items() if key != "attention.q_lora_rank"}
        | YARN_KEYS
        | {"rope.scaling.yarn_log_multiplier": 0.1, "expert_gating_func": 1},
        {"rope_theta": 500.0},
    ),
    "deepseek v2": Case(
        "deepseek2",
        family("deepseek v2"),
        LATENT_KEYS | {"expert_group_count": 3, "expert_group_used_count": 2, "expert_weights_scale": 4.0},
    ),
    "deepseek v3": Case(
        "deepseek2",
        lambda: families.causal(
            "DeepseekV3", **families.LATENT, n_group=3, topk_group=2, rope_parameters=families.LATENT_YARN
        ),
        LATENT_KEYS
        | YARN_KEYS
        | {"rope.scaling.yarn_log_multiplier": 0.1, "expert_gating_func": 2, "expert_weights_norm": True}
        | {"expert_group_count": 3, "expert_group_used_count": 2, "expert_weights_scale": 2.5},
        {"rope_theta": 500.0},
    ),
}


def make(case: Case) -> Any:
    model = case.model().float().eval()
    if case.architecture == "deepseek2" and model.config.model_type == "deepseek_v3":
        torch.manual_seed(4)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


def tiled(array: np.ndarray, config: Any, width: int, axis: int = 0) -> np.ndarray:
    """Value heads by their place under a key head, as Qwen3.5's files have them."""
    num_keys, num_values = config.linear_num_key_heads, config.linear_num_value_heads
    shape = array.shape
    heads = array.reshape(*shape[:axis], num_keys, num_values // num_keys, width, *shape[axis + 1 :])
    return np.ascontiguousarray(heads.swapaxes(axis, axis + 1)).reshape(shape)


def of_qwen(name: str, weight: np.ndarray, case: Case, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """What is different in files of gated delta nets."""
    keys, width = 2 * config.linear_num_key_heads * config.linear_key_head_dim, config.linear_value_head_dim
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        weight = weight + 1
    if ".in_proj_qkvz." in name:
        groups = weight.reshape(config.linear_num_key_heads, -1, weight.shape[1])
        ratio = config.linear_num_value_heads // config.linear_num_key_heads
        sizes = np.cumsum([config.linear_key_head_dim, config.linear_key_head_dim, ratio * width])
        parts = [part.reshape(-1, weight.shape[1]) for part in np.split(groups, sizes, axis=1)]
        stem = name.split("in_proj", maxsplit=1)[0]
        yield f"{stem}in_proj_qkv.weight", np.concatenate(parts[:3])
        yield f"{stem}in_proj_z.weight", parts[3]
        return
    if case.architecture.startswith("qwen35") and "linear_attn." in name:
        if "in_proj_qkv." in name or ".conv1d." in name:
            weight = np.concatenate([weight[:keys], tiled(weight[keys:], config, width)])
        elif "in_proj_z." in name:
            weight = tiled(weight, config, width)
        elif name.endswith((".A_log", ".dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
            weight = tiled(weight, config, 1)
        elif "out_proj." in name:
            weight = tiled(weight, config, width, axis=1)
    yield name, weight


def of_falcon(name: str, weight: np.ndarray, config: Any) -> np.ndarray:
    """Files have its multipliers in the weights."""
    attention = config.attention_in_multiplier
    factors = {"down_proj": config.mlp_multipliers[1], "gate_proj": config.mlp_multipliers[0], "q_proj": attention}
    factors |= {"v_proj": attention, "k_proj": config.key_multiplier * attention, "lm_head": config.lm_head_multiplier}
    factors |= {"o_proj": config.attention_out_multiplier, "out_proj": config.ssm_out_multiplier}
    factors |= {"embed_tokens": config.embedding_multiplier}
    part = name.split(".")[-2]
    if part == "in_proj":
        inner, state = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        sizes = (inner, inner, state, state, config.mamba_n_heads)
        return weight * config.ssm_in_multiplier * np.repeat(config.ssm_multipliers, sizes)[:, None].astype(np.float32)
    return weight * np.float32(factors.get(part, 1.0))


def arranged(name: str, weight: np.ndarray, case: Case, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    if case.architecture.startswith("qwen3"):
        yield from of_qwen(name, weight, case, config)
        return
    if case.architecture == "falcon-h1":
        weight = of_falcon(name, weight, config)
    if name.endswith("kv_b_proj.weight"):
        heads = weight.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        still_dim = config.qk_nope_head_dim
        yield name.replace("kv_b", "k_b"), heads[:, :still_dim].swapaxes(1, 2)
        yield name.replace("kv_b", "v_b"), heads[:, still_dim:]
        return
    if name.endswith((".A_log", ".D")) or re.search(r"(mamba|mixer)\.norm\.weight", name):
        num_groups = getattr(config, "n_groups", None) or getattr(config, "mamba_n_groups", 1)
        weight = weight.reshape((num_groups, -1) if name.endswith("norm.weight") else (-1, 1))
    yield name, weight


def tensors_of(case: Case, model: Any) -> Tensors:
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[case.architecture]
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    tensors, experts = {}, {}
    for stored_name, stored in model.state_dict().items():
        if stored_name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        for name, weight in arranged(stored_name, stored.numpy(), case, model.config):
            weight = -np.exp(weight) if name.endswith(".A_log") else weight
            weight = weight.squeeze(1) if "conv1d.weight" in name or "conv.conv.weight" in name else weight
            name = re.sub(r"\.dt_bias$", ".dt_proj.bias" if "mamba" in name or "linear" in name else ".dt.bias", name)
            name = re.sub(r"gate\.e_score_correction_bias", "gate.e_score_correction.bias", name)
            if ".experts." in name:
                experts[name] = weight
                continue
            tensors[gguf_name(names, name)] = np.ascontiguousarray(weight)
    return tensors | stacks_of(experts)


def gguf_name(names: gguf.TensorNameMap, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    for each in ("model.", "backbone."):
        if (whole := names.get_name(name.replace("model.", each, 1))) is not None:
            return whole
        if (known := names.get_name(stem.replace("model.", each, 1))) is not None:
            return f"{known}.{kind}"
    raise AssertionError(name)


def stacks_of(experts: Tensors) -> Tensors:
    """transformers has stacks already: of gates and inputs in one."""
    found = {}
    for name, weight in experts.items():
        layer = re.search(r"layers\.(\d+)\.", name)
        assert layer is not None and weight.ndim == 3
        parts = ("gate", "up") if "gate_up_proj" in name else (name.rpartition(".")[2].removesuffix("_proj"),)
        for part, matrix in zip(parts, np.split(weight, len(parts), axis=1), strict=True):
            found[f"blk.{layer[1]}.ffn_{part}_exps.weight"] = np.ascontiguousarray(matrix)
    return found


def save(
    case: Case,
    model: Any,
    path: Path,
    tensors: Tensors | None = None,
    *,
    kinds: dict[str, Types] | None = None,
    **changes: Any,
) -> str:
    config = model.config
    numbers = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": config.num_hidden_layers}
    numbers |= {"max_position_embeddings": CONTEXT, "rope_theta": theta_of(config), "layer_norm_eps": eps_of(config)}
    keys = {key: value for key, value in (case.extra | changes).items() if value is not None}
    extra = {f"{case.architecture}.{key}": value for key, value in keys.items()}
    found = tensors_of(case, model) if tensors is None else tensors
    numbers |= {"architecture": case.architecture, "extra": extra, "kinds": kinds} | case.numbers
    return str(write(path / "m.gguf", found, **numbers))


def theta_of(config: Any) -> float:
    return float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10_000.0))


def eps_of(config: Any) -> float:
    names = ("norm_eps", "layer_norm_epsilon", "rms_norm_eps")
    return float(next(getattr(config, name) for name in names if getattr(config, name, None) is not None))


LIKE_OTHERS = (
    *("mamba 2", "falcon-h1, normed after the gate", "nemotron-h", "qwen3-next", "qwen3.5 moe"),
    *("deepseek v2-lite", "deepseek v2"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LIKE_OTHERS)) for name in CASES]
)
def test_a_file_gives_the_logits_of_the_model_it_was_made_from(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    theirs = make(case)
    ours = load_decoder(open_checkpoint(save(case, theirs, tmp_path)), dtype=torch.float32)
    text = torch.arange(40)
    assert assert_logits(logits(ours, text), theirs, text).std() > 0.3


def test_quantized_rows_of_fused_tensors_are_dequantized_each_with_its_own(tmp_path: Path) -> None:
    """Queries and gates by head, two kinds of a state's inputs by key head, and three of them one after the other."""
    case = CASES["qwen3-next"]
    model = make(case)
    tensors = tensors_of(case, model)
    names = [name for name in tensors if re.search(r"attn_q\.|ssm_ba|attn_qkv", name)]
    blocks = {name: gguf.quants.quantize(tensors[name], Types.Q8_0) for name in names}
    rounded = {name: gguf.quants.dequantize(each, Types.Q8_0) for name, each in blocks.items()}
    (tmp_path / "rounded").mkdir()
    packed = save(case, model, tmp_path, tensors | blocks, kinds=dict.fromkeys(names, Types.Q8_0))
    plain = save(case, model, tmp_path / "rounded", tensors | rounded)
    ours, theirs = (dict(open_checkpoint(path).tensors()) for path in (packed, plain))
    assert len(names) == 5 and ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=0, rtol=0)


def test_a_deepseek_file_from_before_its_keys_and_values_were_split_is_read(tmp_path: Path) -> None:
    case = CASES["deepseek v2"]
    model = make(case)
    tensors = tensors_of(case, model)
    for layer in range(2):
        del tensors[f"blk.{layer}.attn_k_b.weight"], tensors[f"blk.{layer}.attn_v_b.weight"]
        weight = model.state_dict()[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
        tensors[f"blk.{layer}.attn_kv_b.weight"] = weight.numpy()
    lengths = {"attention.key_length": 20, "attention.value_length": 10}
    lengths |= {"attention.key_length_mla": None, "attention.value_length_mla": None}
    ours = load_decoder(open_checkpoint(save(case, model, tmp_path, tensors, **lengths)), dtype=torch.float32)
    assert_logits(logits(ours, torch.arange(40)), model, torch.arange(40))


def test_ranks_have_their_heads_of_keys_and_values_that_a_file_stores_apart(tmp_path: Path) -> None:
    case = CASES["deepseek v3"]
    model = make(case)
    path = save(case, model, tmp_path)

    def run(group: TensorGroup) -> torch.Tensor:
        with torch.inference_mode(False):  # threads of the loader write to the tensors
            ours = load_decoder(open_checkpoint(path), dtype=torch.float32, group=group)
        return logits(ours, torch.arange(40))

    for found in on_ranks(2, run):
        assert_logits(found, model, torch.arange(40))


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        ("mamba 2", {"ssm.time_step_rank": None}, ModelError, "positive integer mamba_num_heads, got None"),
        ("qwen3-next", {"ssm.state_size": 9}, ModelError, "its config implies"),
        ("nemotron-h moe", {"moe_latent_size": 16}, UnsupportedModelError, "moe_latent_size=16"),
        ("deepseek v2", {"expert_weights_norm": True}, UnsupportedModelError, "expert_weights_norm=True"),
    ],
)
def test_what_a_file_leaves_out_or_says_otherwise_is_refused(
    name: str, changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    case = CASES[name]
    path = save(case, make(case), tmp_path, **changes)
    with pytest.raises(error, match=message):
        load_decoder(open_checkpoint(path), dtype=torch.float32)


@pytest.mark.parametrize(("num_experts", "groups"), [(256, (8, 4)), (384, (1, 1))])
def test_groups_that_an_older_file_of_deepseek_v3_does_not_state_are_those_of_the_model(
    num_experts: int, groups: tuple[int, int], tmp_path: Path
) -> None:
    case, none = CASES["deepseek v3"], {"expert_group_count": None, "expert_group_used_count": None}
    table = {"token_embd.weight": np.zeros((96, 32), np.float32)}
    spec = open_checkpoint(save(case, make(case), tmp_path, table, expert_count=num_experts, **none)).spec
    assert spec.mixture is not None and (spec.mixture.num_groups, spec.mixture.num_groups_chosen) == groups
