"""Mixtures of experts from GGUF files, named and arranged as llama.cpp's converter does it."""

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
from transformers import (
    Dots1Config,
    Dots1ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from headrace.errors import ModelError, UnsupportedModelError
from headrace.kernels import ops
from headrace.models import ModelSpec, load_decoder, open_checkpoint
from headrace.models.spec import QueryGrowth
from headrace.models.weights import gguf_tensors
from tests import seeds
from tests.models.test_gguf import LLAMA3_ROPE, SMALL, Types, interleave, logits, rope_divisors, write
from tests.models.test_parity import is_gain
from tests.tolerances import assert_logits

pytestmark = pytest.mark.parity

Tensors = dict[str, np.ndarray]
FOUR_LAYERS = SMALL | {"num_hidden_layers": 4, "head_dim": 16}
# One layer does not rotate, every other one has experts.
LLAMA4 = FOUR_LAYERS | {
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "interleave_moe_layer_step": 2,
    "rope_parameters": LLAMA3_ROPE,
    "rms_norm_eps": 1e-6,
    "pad_token_id": None,
}
LLAMA4_KEYS = {"expert_used_count": 1, "expert_feed_forward_length": 32, "interleave_moe_layer_step": 2}
QWEN3 = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
GPT_OSS_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": False}
GPT_OSS_ROPE |= {"original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}
MIXTRAL = MixtralConfig(**SMALL, num_local_experts=4, rms_norm_eps=1e-6, rope_theta=10000.0)


@dataclass(frozen=True)
class Case:
    architecture: str
    model: Callable[[], PreTrainedModel]
    extra: dict[str, Any]  # keys of the architecture
    numbers: dict[str, Any] = field(default_factory=dict)  # of the metadata


CASES = {
    "llama 4": Case(
        "llama4",
        lambda: Llama4ForCausalLM(Llama4TextConfig(**LLAMA4, num_local_experts=4)),
        LLAMA4_KEYS | {"expert_count": 4, "rope.dimension_count": 16},
        {"num_hidden_layers": 4, "head_dim": 16, "rope_theta": 500.0},
    ),
    "llama 4 with 128 experts": Case(
        "llama4",
        lambda: Llama4ForCausalLM(Llama4TextConfig(**LLAMA4, num_local_experts=128, use_qk_norm=False)),
        LLAMA4_KEYS | {"expert_count": 128},
        {"num_hidden_layers": 4, "head_dim": 16, "rope_theta": 500.0},
    ),
    "mixtral": Case(
        "llama",
        lambda: MixtralForCausalLM(MIXTRAL),
        {"expert_count": 4, "expert_used_count": 2, "rope.dimension_count": 16},
    ),
    "qwen3 moe": Case(
        "qwen3moe",
        lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **QWEN3, head_dim=32)),
        {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 32},
        {"head_dim": 32},
    ),
    "qwen3-vl moe": Case(
        "qwen3vlmoe",
        lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **QWEN3, head_dim=32)),
        {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 32}
        | {"rope.dimension_sections": [6, 5, 5, 0]},
        {"head_dim": 32},
    ),
    "olmoe": Case(
        "olmoe",
        lambda: OlmoeForCausalLM(OlmoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, rms_norm_eps=1e-6)),
        {"expert_count": 4, "expert_used_count": 2},
    ),
    "gpt-oss": Case(
        "gpt-oss",
        lambda: GptOssForCausalLM(
            GptOssConfig(
                **SMALL,
                num_local_experts=4,
                num_experts_per_tok=2,
                head_dim=16,
                sliding_window=8,
                rms_norm_eps=1e-6,
                rope_parameters=GPT_OSS_ROPE,
            )
        ),
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 96, "attention.sliding_window": 8}
        | {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
        | {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0},
        {"head_dim": 16},
    ),
    "glm 4.5": Case(
        "glm4moe",
        lambda: Glm4MoeForCausalLM(
            Glm4MoeConfig(
                **SMALL,
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                head_dim=16,
                use_qk_norm=True,
                attention_bias=True,
                routed_scaling_factor=2.5,
                rms_norm_eps=1e-6,
            )
        ),
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "expert_shared_count": 1}
        | {"leading_dense_block_count": 1, "expert_weights_scale": 2.5, "expert_weights_norm": True}
        | {"expert_gating_func": 2, "rope.dimension_count": 8, "nextn_predict_layers": 1},
        {"head_dim": 16, "num_hidden_layers": 3},
    ),
    "ernie 4.5 moe": Case(
        "ernie4_5-moe",
        lambda: Ernie4_5_MoeForCausalLM(
            Ernie4_5_MoeConfig(
                **SMALL, moe_num_experts=4, moe_k=2, moe_intermediate_size=24, rms_norm_eps=1e-6, rope_theta=10000.0
            )
        ),
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24, "expert_shared_count": 2}
        | {"leading_dense_block_count": 1, "interleave_moe_layer_step": 1, "expert_shared_feed_forward_length": 48},
    ),
    "minimax m2": Case(
        "minimax-m2",
        lambda: MiniMaxM2ForCausalLM(
            MiniMaxM2Config(
                **SMALL,
                num_local_experts=4,
                num_experts_per_tok=2,
                head_dim=16,
                rms_norm_eps=1e-6,
                rotary_dim=8,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            )
        ),
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 96, "rope.dimension_count": 8}
        | {"expert_gating_func": 2},
        {"head_dim": 16},
    ),
    "qwen2 moe": Case(
        "qwen2moe",
        lambda: Qwen2MoeForCausalLM(
            Qwen2MoeConfig(
                **SMALL,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                shared_expert_intermediate_size=48,
            )
        ),
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
        | {"expert_shared_feed_forward_length": 48},
    ),
    "granite moe": Case(
        "granitemoe",
        lambda: GraniteMoeForCausalLM(
            GraniteMoeConfig(**SMALL, num_local_experts=4, residual_multiplier=0.5, attention_multiplier=0.2)
        ),
        {"expert_count": 4, "expert_used_count": 2, "residual_scale": 0.5, "attention.scale": 0.2}
        | {"embedding_scale": 1.0, "logit_scale": 1.0},
    ),
    "granite moe with a shared expert": Case(
        "granitemoe",
        lambda: GraniteMoeSharedForCausalLM(
            GraniteMoeSharedConfig(**SMALL, num_local_experts=4, shared_intermediate_size=24, logits_scaling=2.0)
        ),
        {"expert_count": 4, "expert_used_count": 2, "residual_scale": 1.0, "attention.scale": 1.0}
        | {"embedding_scale": 1.0, "logit_scale": 2.0, "expert_shared_feed_forward_length": 24},
    ),
    "phi-3.5 moe": Case(
        "phimoe",
        lambda: PhimoeForCausalLM(
            PhimoeConfig(
                **SMALL,
                num_local_experts=6,
                attention_bias=True,
                lm_head_bias=True,
                rope_theta=10000.0,
                rms_norm_eps=1e-6,
            )
        ),
        {"expert_count": 6, "expert_used_count": 2, "attention.sliding_window": 0, "rope.dimension_count": 16},
    ),
    "dots1": Case(
        "dots1",
        lambda: Dots1ForCausalLM(
            Dots1Config(
                **SMALL,
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                n_shared_experts=2,
                first_k_dense_replace=1,
                head_dim=16,
                routed_scaling_factor=2.5,
                norm_topk_prob=True,
                rms_norm_eps=1e-6,
            )
        ),
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "expert_shared_count": 2}
        | {"leading_dense_block_count": 1, "expert_weights_scale": 2.5, "expert_weights_norm": True}
        | {"expert_gating_func": 2},
        {"head_dim": 16},
    ),
}


def make(case: Case) -> PreTrainedModel:
    torch.manual_seed(seeds.seed_of(case.architecture))
    model = case.model().float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if is_gain(name) else 0.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0.0, 0.2)
    return model


def parts(name: str, tensor: torch.Tensor, case: Case) -> Iterator[tuple[str, torch.Tensor]]:
    """Stacks of experts have a row per output, with a separate gate; Llama 4's checkpoints transpose them."""
    name = name.replace("block_sparse_moe.experts.", "mlp.experts.").replace("moe.router.w", "moe.router.layer.w")
    if ".experts." in name and case.architecture in ("llama4", "gpt-oss") and tensor.ndim == 3:
        tensor = tensor.transpose(1, 2)
    if "gate_up_proj" in name and case.architecture == "gpt-oss":
        tensor = torch.cat((tensor[:, ::2], tensor[:, 1::2]), dim=1)
    if name.endswith("shared_mlp.input_linear.weight"):
        stem = name.replace("shared_mlp.input_linear.weight", "mlp.shared_expert.")
        yield from zip((f"{stem}gate_proj.weight", f"{stem}up_proj.weight"), tensor.chunk(2), strict=True)
        return
    name = name + ".weight" if name.endswith("sinks") else name
    name = re.sub(r"\.mlp\.[\w.]*e_score_correction_bias", ".mlp.gate.e_score_correction.bias", name)
    if name.endswith("_proj_bias"):
        parts_of = ("gate", "up") if "gate_up" in name else ("down",)
        stem = name.rpartition(".")[0]
        biases = tensor.chunk(len(parts_of), dim=1)
        yield from ((f"{stem}.{part}_proj.bias", bias) for part, bias in zip(parts_of, biases, strict=True))
        return
    if name.endswith("experts.gate_up_proj"):
        stem = name.removesuffix("gate_up_proj")
        yield from zip((f"{stem}gate_proj.weight", f"{stem}up_proj.weight"), tensor.chunk(2, dim=1), strict=True)
    else:
        yield (f"{name}.weight" if name.endswith("experts.down_proj") else name), tensor


def tensors_of(case: Case, model: PreTrainedModel) -> Tensors:
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[case.architecture]
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    tensors = {"rope_freqs.weight": rope_divisors(16)} if case.architecture == "llama4" else {}
    for stored_name, stored in model.state_dict().items():
        for name, tensor in parts(stored_name, stored, case):
            (stem, _, kind), weight = name.rpartition("."), np.ascontiguousarray(tensor.numpy())
            part = stem.rpartition(".")[2]
            if case.architecture in ("llama", "granitemoe") and part in heads:
                weight = interleave(weight, heads[part])
            weight = weight.squeeze()  # as the converter does it
            tensors[f"{names.get_name(stem)}.{kind}"] = weight
    return tensors


def save(case: Case, tensors: Tensors, path: Path, *, kind: Types = Types.F32, **extra: Any) -> str:
    """`kind` is for all matrices but the routers."""
    kinds = {name: kind for name, tensor in tensors.items() if tensor.ndim > 1 and "ffn_gate_inp" not in name}
    keys = {key: value for key, value in (case.extra | extra).items() if value is not None}
    values = {f"{case.architecture}.{key}": value for key, value in keys.items()}
    numbers = {"architecture": case.architecture, "kinds": kinds, "extra": values, **case.numbers}
    return str(write(path / "model.gguf", tensors, **numbers))


def assert_same_logits(path: str, theirs: PreTrainedModel) -> None:
    text = torch.arange(40)
    ours = load_decoder(open_checkpoint(path), dtype=torch.float32)
    assert assert_logits(logits(ours, text), theirs, text).std() > 0.5


# What the others show too is left to the slow tests.
LIKE_OTHERS = ("qwen2 moe", "ernie 4.5 moe", "minimax m2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LIKE_OTHERS)) for name in CASES]
)
def test_a_file_gives_the_logits_of_the_model_it_was_made_from(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    theirs = make(case)
    assert_same_logits(save(case, tensors_of(case, theirs), tmp_path), theirs)


@pytest.mark.parametrize("name", ["llama 4", "mixtral", "qwen3 moe"])
def test_a_quantized_file_gives_the_logits_of_the_model_with_rounded_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "takes_groups", lambda device, dtype: False)  # packed weights: test_gguf_groups.py
    case = CASES[name]
    theirs = make(case)
    path = save(case, tensors_of(case, theirs), tmp_path, kind=Types.Q8_0)
    with torch.no_grad():
        for stored_name, stored in theirs.state_dict().items():
            is_router = stored_name.endswith(("router.weight", "mlp.gate.weight"))
            for _, part in parts(stored_name, stored, case):
                if part.ndim > 1 and not is_router:
                    blocks = gguf.quants.quantize(np.ascontiguousarray(part.numpy()), Types.Q8_0)
                    part.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, Types.Q8_0)))
    assert_same_logits(path, theirs)


def test_experts_in_mxfp4_give_the_logits_of_their_rounded_weights(tmp_path: Path) -> None:
    """As the published files of gpt-oss store them; biases and other matrices are not quantized."""
    case = CASES["gpt-oss"]
    tensors = tensors_of(case, make(case))
    kinds = {name: Types.MXFP4 for name in tensors if name.endswith("_exps.weight")}
    blocks = {name: gguf.quants.quantize(tensors[name], kind) for name, kind in kinds.items()}
    rounded = {name: gguf.quants.dequantize(each, Types.MXFP4) for name, each in blocks.items()}
    values = {f"gpt-oss.{key}": value for key, value in case.extra.items()}
    numbers = {"architecture": "gpt-oss", "extra": values, **case.numbers}
    files = [
        write(tmp_path / "mxfp4.gguf", tensors | blocks, kinds=kinds, **numbers),
        write(tmp_path / "rounded.gguf", tensors | rounded, **numbers),
    ]
    narrow, wide = (logits(load_decoder(open_checkpoint(str(f)), dtype=torch.float32), torch.arange(40)) for f in files)
    torch.testing.assert_close(narrow, wide, rtol=0, atol=0)


def test_experts_that_are_tensors_of_their_own_are_read(tmp_path: Path) -> None:
    """As in files of Mixtral's first months."""
    case = CASES["mixtral"]
    theirs, tensors = make(case), {}
    for name, tensor in tensors_of(case, theirs).items():
        if "_exps." in name:
            tensors |= {name.replace("_exps.", f".{expert}."): matrix for expert, matrix in enumerate(tensor)}
        else:
            tensors[name] = tensor
    assert "blk.1.ffn_down.3.weight" in tensors
    assert_same_logits(save(case, tensors, tmp_path), theirs)


def test_an_expert_is_read_without_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["mixtral"]
    tensors = tensors_of(case, make(case))
    checkpoint = open_checkpoint(save(case, tensors, tmp_path, kind=Types.Q8_0))
    sizes = []

    def dequantize(raw: Any, type_name: str, out: Any) -> None:
        sizes.append(out.size)
        gguf_tensors_dequantize(raw, type_name, out)

    gguf_tensors_dequantize = gguf_tensors.dequantize
    monkeypatch.setattr(gguf_tensors, "dequantize", dequantize)
    found = checkpoint.tensor("model.layers.1.mlp.experts.2.down_proj.weight").numpy()
    stored = gguf.quants.quantize(tensors["blk.1.ffn_down_exps.weight"][2], Types.Q8_0)
    np.testing.assert_array_equal(found, gguf.quants.dequantize(stored, Types.Q8_0))
    assert sum(sizes) == found.size == 64 * 96


def test_routers_in_float32_do_not_make_a_float16_file_another(tmp_path: Path) -> None:
    case = CASES["qwen3 moe"]
    path = save(case, tensors_of(case, make(case)), tmp_path, kind=Types.F16)
    assert open_checkpoint(path).spec.dtype == "float16"


@pytest.mark.parametrize(
    ("name", "extra", "message"),
    [
        ("mixtral", {"expert_used_count": 5}, "num_experts_per_tok is 5, but there are 4 experts"),
        ("mixtral", {"expert_used_count": None}, "no expert_used_count"),
        ("mixtral", {"expert_shared_count": 1}, "expert_shared_count=1"),
        ("qwen3 moe", {"expert_count": None}, "no expert_count"),
        ("qwen3 moe", {"expert_feed_forward_length": None}, "no expert_feed_forward_length"),
        ("qwen3 moe", {"expert_weights_scale": 2.5}, "expert_weights_scale=2.5"),
        ("llama 4", {"interleave_moe_layer_step": None}, "no interleave_moe_layer_step"),
        ("llama 4", {"attention.sliding_window": 0}, "attention_chunk_size, got 0"),
    ],
)
def test_counts_that_do_not_fit_or_are_not_there_are_refused(
    name: str, extra: dict[str, Any], message: str, tmp_path: Path
) -> None:
    case = CASES[name]
    path = save(case, {"token_embd.weight": np.zeros((96, 64), np.float32)}, tmp_path, **extra)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "extra", "message"),
    [
        ("mixtral", {"expert_count": 8}, r"router.weight' has shape \[4, 64\], its config implies \[8, 64\]"),
        ("qwen3 moe", {"expert_feed_forward_length": 48}, r"has shape \[32, 64\], its config implies \[48, 64\]"),
        ("llama 4", {"interleave_moe_layer_step": 1}, "lacks tensors 'model.layers.0.mlp.router.weight'"),
        ("llama 4", {"interleave_moe_layer_step": 4}, "lacks tensors 'model.layers.1.mlp.gate_proj.weight'"),
    ],
)
def test_tensors_that_do_not_fit_the_counts_are_refused(
    name: str, extra: dict[str, Any], message: str, tmp_path: Path
) -> None:
    case = CASES[name]
    checkpoint = open_checkpoint(save(case, tensors_of(case, make(case)), tmp_path, **extra))
    with pytest.raises(ModelError, match=message):
        load_decoder(checkpoint, dtype=torch.float32)


def test_a_stack_of_too_few_experts_is_named(tmp_path: Path) -> None:
    case = CASES["mixtral"]
    tensors = tensors_of(case, make(case))
    tensors["blk.1.ffn_up_exps.weight"] = tensors["blk.1.ffn_up_exps.weight"][:3]
    checkpoint = open_checkpoint(save(case, tensors, tmp_path))
    with pytest.raises(ModelError, match=r"'blk.1.ffn_up_exps.weight' is for 3 experts; its config says 4"):
        load_decoder(checkpoint, dtype=torch.float32)


def spec_of(path: Path, name: str, **extra: Any) -> ModelSpec:
    case, context = CASES[name], {"max_position_embeddings": 16384}
    long = Case(case.architecture, case.model, case.extra, case.numbers | context)
    return open_checkpoint(save(long, {"token_embd.weight": np.zeros((96, 64), np.float32)}, path, **extra)).spec


def test_what_a_llama_4_file_leaves_out_is_as_llama_cpp_has_it(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "llama 4")
    assert spec.windows == (8192, 8192, 8192, None)
    assert (spec.windows_slide, spec.ropeless_layers) == (False, (3,))
    assert spec.query_growth == QueryGrowth(step=8192, strength=0.1)
    assert spec.bare_qk_norm
    assert not spec_of(tmp_path, "llama 4 with 128 experts").bare_qk_norm


def test_a_window_in_a_mixtral_file_is_kept(tmp_path: Path) -> None:
    assert spec_of(tmp_path, "mixtral").windows == (None, None)
    assert spec_of(tmp_path, "mixtral", **{"attention.sliding_window": 4096}).windows == (4096, 4096)


def test_a_llama_file_that_counts_no_experts_is_dense(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "mixtral", expert_count=0, expert_used_count=0)
    assert (spec.family, spec.mixture) == ("llama", None)


def test_a_mixture_of_another_kind_is_refused_as_such(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": np.zeros((96, 64), np.float32)}
    path = write(tmp_path / "model.gguf", tensors, architecture="grok", extra={"grok.expert_count": 64})
    with pytest.raises(
        UnsupportedModelError, match=r"'grok' is not supported: it is a mixture of experts of a kind.*qwen3moe"
    ):
        open_checkpoint(str(path))
