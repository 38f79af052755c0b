"""GGUF files: header, storage types, and the same logits as the Hugging Face checkpoint they were made from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from headrace.dist.mesh import Mesh
from headrace.errors import ModelError, UnsupportedModelError
from headrace.models import ModelSpec, RopeSpec, load_decoder, open_checkpoint
from headrace.models.gguf_file import read_gguf
from headrace.models.shards import Shards
from headrace.models.weights.dequantize import dequantize
from headrace.models.weights.source import Slice, slice_of
from tests import seeds
from tests.models.one_sequence import logits
from tests.tolerances import assert_logits

Types = gguf.GGMLQuantizationType
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA2 = SMALL | {"num_hidden_layers": 4, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
GEMMA2_CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 8.0}
GEMMA3 = GEMMA2 | {"num_hidden_layers": 7}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "llama, biased": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, attention_bias=True)),
    "llama, scaled rope": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=32)),
    "gemma, tied": lambda: GemmaForCausalLM(GemmaConfig(**SMALL, head_dim=32)),
    "gemma2, tied": lambda: Gemma2ForCausalLM(Gemma2Config(**GEMMA2, **GEMMA2_CAPS)),
    "gemma3, tied": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA3, rope_parameters=GEMMA3_ROPE)),
}
EXTRA: dict[str, dict[str, Any]] = {
    "gemma2, tied": {
        "gemma2.attention.sliding_window": 8,
        "gemma2.attn_logit_softcapping": 3.0,
        "gemma2.final_logit_softcapping": 8.0,
    },
    "gemma3, tied": {
        "gemma3.attention.sliding_window": 8,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 4.0,
    },
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
POST_NORM_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def make(name: str) -> PreTrainedModel:
    torch.manual_seed(seeds.seed_of(name))
    model: PreTrainedModel = MODELS[name]().float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.2)
    return model


def gguf_name(name: str, architecture: str) -> str:
    names = NAMES | POST_NORM_NAMES if architecture in ("gemma2", "gemma3") else NAMES
    stem, _, kind = name.rpartition(".")
    if stem in names:
        return f"{names[stem]}.{kind}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{names[part]}.{kind}"


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Row order for llama.cpp's rotation of neighbours: first and second halves of a head are interleaved."""
    half = weight.shape[0] // num_heads // 2
    order = [head * 2 * half + side * half + i for head in range(num_heads) for i in range(half) for side in (0, 1)]
    return np.ascontiguousarray(weight[order])


def tensors_of(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    config, tensors = model.config, {}
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy()
        if architecture == "llama" and "q_proj" in name:
            weight = interleave(weight, config.num_attention_heads)
        if architecture == "llama" and "k_proj" in name:
            weight = interleave(weight, config.num_key_value_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            weight = weight + 1
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            tensors[gguf_name(name, architecture)] = weight
    if config.rope_parameters.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = rope_divisors(config.head_dim)
    return tensors


def rope_divisors(head_dim: int) -> np.ndarray:
    """As llama.cpp's converter writes the scaling of Llama 3."""
    low, high = (32 / LLAMA3_ROPE[key] for key in ("low_freq_factor", "high_freq_factor"))  # type: ignore[operator]
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * 500.0 ** (i / head_dim)
        smooth = (32 / wavelength - 1.0) / (4.0 - 1.0)
        between = 1 / ((1 - smooth) / 8.0 + smooth)
        divisors.append(1.0 if wavelength < high else 8.0 if wavelength > low else between)
    return np.array(divisors, dtype=np.float32)


def write(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    architecture: str = "llama",
    kinds: Mapping[str, Types] | None = None,
    extra: Mapping[str, Any] | None = None,
    **numbers: Any,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    values = {**SMALL, "rope_theta": 10000.0} | numbers
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_head_count(values["num_attention_heads"])
    writer.add_head_count_kv(values["num_key_value_heads"])
    if "layer_norm_eps" in values:
        writer.add_layer_norm_eps(values["layer_norm_eps"])
    else:
        writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(values["rope_theta"])
    if "head_dim" in numbers:
        writer.add_key_length(numbers["head_dim"])
        writer.add_value_length(numbers["head_dim"])
    for key, value in (extra or {}).items():
        add(writer, key, value)
    for name, tensor in tensors.items():
        kind = (kinds or {}).get(name, Types.F32)
        stored = tensor if tensor.dtype == np.uint8 else gguf.quants.quantize(tensor, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if key == "general.alignment":
        writer.add_custom_alignment(value)  # also used for the tensors
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float64(key, value)
    else:
        writer.add_string(key, value)


@pytest.mark.parametrize("name", MODELS)
def test_a_gguf_file_gives_the_logits_of_the_model_it_was_made_from(name: str, tmp_path: Path) -> None:
    theirs = make(name)
    architecture = name.split(",", maxsplit=1)[0]
    rope = theirs.config.rope_parameters.get("full_attention", theirs.config.rope_parameters)
    numbers = {"rope_theta": rope["rope_theta"], "num_hidden_layers": theirs.config.num_hidden_layers}
    if architecture == "qwen3" or architecture.startswith("gemma"):
        numbers["head_dim"] = 32
    path = write(
        tmp_path / "model.gguf",
        tensors_of(theirs, architecture),
        architecture=architecture,
        extra=EXTRA.get(name),
        **numbers,
    )
    checkpoint = open_checkpoint(str(path))
    text = torch.arange(40)
    assert_logits(logits(load_decoder(checkpoint, dtype=torch.float32), text), theirs, text)
    assert checkpoint.spec.tie_embeddings == ("tied" in name)
    assert checkpoint.text.gguf_metadata is not None


def gemma_spec(path: Path, architecture: str, **changes: Any) -> ModelSpec:
    numbers = {"num_hidden_layers": 7, "head_dim": 32} | changes.pop("numbers", {})
    extra = {f"{architecture}.{key}": value for key, value in changes.items()}
    tensors = {"token_embd.weight": np.zeros((96, 64), np.float32)}
    return open_checkpoint(
        str(write(path / "model.gguf", tensors, architecture=architecture, extra=extra, **numbers))
    ).spec


def test_what_a_gemma_file_leaves_out_is_as_llama_cpp_has_it(tmp_path: Path) -> None:
    spec = gemma_spec(tmp_path, "gemma2")
    assert (spec.windows[0], spec.attention_softcap, spec.logit_softcap) == (None, 50.0, 30.0)  # 4096 > the context
    spec = gemma_spec(tmp_path, "gemma3", **{"attention.sliding_window": 8})
    assert spec.windows == (8,) * 5 + (None, 8)
    assert spec.local_rope == RopeSpec(theta=10_000.0)
    assert (spec.attention_softcap, spec.logit_softcap, spec.norm_offset) == (None, None, 0.0)


def test_a_gemma_file_may_state_its_pattern_and_its_local_rope(tmp_path: Path) -> None:
    values = {"attention.sliding_window": 8, "attention.sliding_window_pattern": 3, "rope.freq_base_swa": 500.0}
    spec = gemma_spec(tmp_path, "gemma3", **values)
    assert spec.windows == (8, 8, None, 8, 8, None, 8)
    assert spec.local_rope == RopeSpec(theta=500.0)


@pytest.mark.parametrize(("architecture", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_by_the_share_of_a_head_in_the_hidden_size(
    architecture: str, num_layers: int, tmp_path: Path
) -> None:
    window = {"attention.sliding_window": 8}
    small = gemma_spec(tmp_path, architecture, **window)
    large = gemma_spec(tmp_path, architecture, **window, numbers={"num_hidden_layers": num_layers})
    assert (small.attention_scale, large.attention_scale) == (pytest.approx(32**-0.5), pytest.approx(16**-0.5))


def random_blocks(kind: Types, num_rows: int) -> np.ndarray:
    """Arbitrary bits, as no quantizer is needed to test reading, with scales that are finite."""
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (num_rows * 512 // block_len, block_bytes), dtype=np.uint8)
    scale_offsets = {
        Types.Q6_K: (208,),
        Types.Q4_K: (0, 2),
        Types.Q5_K: (0, 2),
        Types.Q2_K: (80, 82),
        Types.Q3_K: (108,),
    }
    for offset in scale_offsets.get(kind, (0, 2) if kind in (Types.Q4_1, Types.Q5_1) else (0,)):
        scales = rng.normal(size=len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(num_rows, -1)


BLOCK_KINDS = [
    Types[name] for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
]


@pytest.mark.parametrize("kind", BLOCK_KINDS, ids=lambda kind: kind.name)
def test_quantized_blocks_read_as_the_gguf_package_reads_them(kind: Types) -> None:
    raw = random_blocks(kind, num_rows=6)
    out = np.full((6, 512), np.nan, dtype=np.float32)
    dequantize(raw, kind.name, out)
    np.testing.assert_array_equal(out, gguf.quants.dequantize(raw, kind))


@pytest.mark.parametrize("kind", [Types.F32, Types.F16, Types.BF16], ids=lambda kind: kind.name)
def test_floating_types_read_as_the_gguf_package_reads_them(kind: Types) -> None:
    weights = np.random.default_rng(1).normal(size=(6, 512)).astype(np.float32)
    raw = gguf.quants.quantize(weights, kind).view(np.uint8)
    out = np.full((6, 512), np.nan, dtype=np.float32)
    dequantize(raw, kind.name, out)
    expected = weights if kind == Types.F32 else gguf.quants.dequantize(raw, kind)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    "kind", [Types.Q4_0, Types.Q4_1, Types.Q5_1, Types.Q8_0, Types.F16], ids=lambda kind: kind.name
)
def test_a_quantized_file_loads_as_its_rounded_weights_would(kind: Types, tmp_path: Path) -> None:
    theirs = make("llama")
    tensors = tensors_of(theirs, "llama")
    kinds = {name: kind for name, tensor in tensors.items() if tensor.ndim == 2}
    rounded = {
        name: gguf.quants.dequantize(gguf.quants.quantize(tensor, kind), kind) if name in kinds else tensor
        for name, tensor in tensors.items()
    }
    quantized = open_checkpoint(str(write(tmp_path / "quantized.gguf", tensors, kinds=kinds)))
    plain = open_checkpoint(str(write(tmp_path / "plain.gguf", rounded)))
    for name, tensor in quantized.tensors():
        torch.testing.assert_close(tensor, plain.tensor(name), atol=0, rtol=0)
    assert len(dict(quantized.tensors())) == len(tensors)
    narrow = torch.empty(96, 64, dtype=torch.bfloat16)
    assert quantized.weights is not None
    quantized.weights.fill("lm_head.weight", narrow)
    torch.testing.assert_close(narrow, plain.tensor("lm_head.weight").bfloat16(), atol=0, rtol=0)


@pytest.mark.parametrize("size", [2, 3])
def test_the_parts_of_all_ranks_are_the_whole_of_a_quantized_file(size: int, tmp_path: Path) -> None:
    """Three ranks cut blocks of 32 weights: their columns are cut after dequantizing."""
    tensors = tensors_of(make("llama, biased"), "llama")
    kinds = {name: Types.Q8_0 for name, tensor in tensors.items() if tensor.ndim == 2}
    checkpoint = open_checkpoint(str(write(tmp_path / "model.gguf", tensors, kinds=kinds)))
    source = checkpoint.weights
    assert source is not None
    for name, shape in checkpoint.spec.tensor_shapes().items():
        whole = checkpoint.tensor(name)
        for rank in range(size):
            part = Shards(checkpoint.spec, Mesh(rank, size)).part(name)
            out = torch.empty(part.shape(shape))
            before = source.num_bytes_read
            cut = slice_of(part, shape)
            source.fill(name, out, cut)
            assert torch.equal(out, whole if cut is None else cut.of(whole)), name
            row_bytes = shape[-1] // 32 * 34 if len(shape) == 2 else 4
            assert source.num_bytes_read - before == len(out) * row_bytes  # whole rows, of cut columns too
    rows = source.stored_rows("model.embed_tokens.weight", Slice(range(48, 96)))
    assert rows is not None and len(rows.raw) == 48


def test_a_tensor_of_many_pieces_is_put_together_in_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    tensors = {"token_embd.weight": rng.normal(size=(9001, 64)).astype(np.float32)}
    checkpoint = open_checkpoint(str(write(tmp_path / "large.gguf", tensors)))
    np.testing.assert_array_equal(checkpoint.tensor("model.embed_tokens.weight").numpy(), tensors["token_embd.weight"])


def test_metadata_reads_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    extra = {
        "tokenizer.ggml.tokens": ["a", "Ġb", "日本", ""],
        "tokenizer.ggml.token_type": [1, 1, 3, 1],
        "tokenizer.ggml.scores": [0.5, -1.0, 2.0, 0.0],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}\n",
        "general.alignment": 64,
        "some.number": 2.5,
    }
    path = write(tmp_path / "model.gguf", tensors_of(make("llama"), "llama"), extra=extra)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == expected
    assert extra.items() <= ours.metadata.items()
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert (found.offset, found.num_bytes, found.type_name) == (tensor.data_offset, tensor.n_bytes, "F32")
        assert found.shape == tuple(reversed(tensor.shape.tolist()))


def test_end_ids_come_from_the_metadata_and_from_the_tokens_that_end_a_turn_and_are_no_text(tmp_path: Path) -> None:
    extra = {
        "tokenizer.ggml.tokens": ["<s>", "</s>", "<|eot_id|>", "<|im_end|>", "<end_of_turn>"],
        "tokenizer.ggml.token_type": [3, 3, 3, 1, 4],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    spec = open_checkpoint(str(write(tmp_path / "model.gguf", tensors_of(make("llama"), "llama"), extra=extra))).spec
    assert spec.eos_token_ids == (1, 2, 4)
    assert spec.bos_token_id == 0


@pytest.mark.parametrize(
    "extra",
    [
        {"llama.expert_used_count": 2},
        {"llama.attention.clamp_kqv": 8.0},
        {"llama.rope.dimension_count": 8},
        {"llama.rope.scaling.type": "longrope"},
        {"llama.logit_scale": 0.5},
        {"llama.final_logit_softcapping": 30.0},
        {"llama.rope.freq_base_swa": 500.0},
        {"split.count": 2},
    ],
)
def test_metadata_that_would_be_computed_wrongly_is_refused(extra: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", tensors_of(make("llama"), "llama"), extra=extra)
    with pytest.raises(UnsupportedModelError):
        open_checkpoint(str(path))


def test_a_sliding_window_in_a_llama_file_is_kept(tmp_path: Path) -> None:
    extra = {"llama.attention.sliding_window": 32}
    path = write(tmp_path / "model.gguf", tensors_of(make("llama"), "llama"), extra=extra)
    assert open_checkpoint(str(path)).spec.windows == (32, 32)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", tensors_of(make("llama"), "llama"), architecture="mamba")
    with pytest.raises(UnsupportedModelError, match=r"'mamba' is not supported.*llama, llama4, mistral3.*qwen2, qwen3"):
        open_checkpoint(str(path))


@pytest.mark.parametrize("keep", [0, 3, 20, 300, 5000, -1])
def test_a_truncated_file_is_refused(keep: int, tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", tensors_of(make("llama"), "llama")).read_bytes()
    path = tmp_path / "truncated.gguf"
    path.write_bytes(whole[:keep])
    with pytest.raises(ModelError):
        open_checkpoint(str(path))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(UnsupportedModelError, match="not a GGUF file"):
        open_checkpoint(str(path))
