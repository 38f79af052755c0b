"""More families against transformers, one compact run each: chunks of prompts, decoding and both in one step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace.errors import UnsupportedModelError
from headrace.models import dense_traits, load_decoder, open_checkpoint
from headrace.models.hub_config import spec_from_config
from headrace.models.spec import ModelSpec
from tests import seeds
from tests.models import one_sequence
from tests.models.test_gguf import gguf_name, interleave, logits, write
from tests.models.test_parity import SCHEDULES, TEXT_LENS, PagedRun, is_gain, load
from tests.tolerances import assert_logits

pytestmark = pytest.mark.parity

VOCAB_SIZE = 96
TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 1, 2]}
PIXTRAL = {"model_type": "pixtral", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
PIXTRAL |= {"intermediate_size": 16, "image_size": 28, "patch_size": 14, "head_dim": 8}
SIGLIP = PIXTRAL | {"model_type": "siglip_vision_model"}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
QWEN3_VISION = QWEN_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
DEEPSEEK = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}
DEEPSEEK |= {"n_shared_experts": 2, "first_k_dense_replace": 1}
MINIMAX = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}
LATENT: dict[str, Any] = {key: value for key, value in DEEPSEEK.items() if key != "head_dim"}
LATENT |= {"q_lora_rank": 20, "kv_lora_rank": 24, "num_key_value_heads": 4}
LATENT |= {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
LATENT_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
LATENT_YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}
GPT_OSS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8}
GPT_OSS |= {"intermediate_size": 64}
GPT_OSS |= {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "truncate": False}}
GPT_OSS["rope_parameters"] |= {"original_max_position_embeddings": 32}
GEMMA3N: dict[str, Any] = {"num_hidden_layers": 6, "head_dim": 16, "sliding_window": 8, "num_kv_shared_layers": 2}
GEMMA3N |= {"vocab_size_per_layer_input": 90, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
GEMMA3N |= {"activation_sparsity_pattern": [0.9, 0.8, 0.0, 0.0, 0.5, 0.0]}
GEMMA3N["layer_types"] = [f"{kind}_attention" for kind in ("full", "sliding", "full", "sliding", "sliding", "full")]
GRANITE = {"embedding_multiplier": 6.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0}
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}


def multimodal(name: str, model: str, text: dict[str, Any], vision: dict[str, Any], **others: Any) -> Any:
    config = getattr(transformers, f"{name}Config")
    return getattr(transformers, model)(config(text_config=TINY | text, vision_config=vision, **others))


def causal(name: str, **values: Any) -> Any:
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**TINY | values))


MODELS: dict[str, Any] = {
    "gemma 3 with images": lambda: multimodal(
        "Gemma3",
        "Gemma3ForConditionalGeneration",
        {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 6},
        SIGLIP,
        mm_tokens_per_image=1,
    ),
    "gemma 3n": lambda: transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**TINY | GEMMA3N)),
    "mistral small 3": lambda: multimodal(
        "Mistral3",
        "Mistral3ForConditionalGeneration",
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        PIXTRAL,
        tie_word_embeddings=False,
    ),
    "ministral 3 with images": lambda: multimodal(
        "Mistral3",
        "Mistral3ForConditionalGeneration",
        {"model_type": "ministral3", "head_dim": 16, "tie_word_embeddings": True, "rope_parameters": MINISTRAL3_ROPE},
        PIXTRAL,
        tie_word_embeddings=True,
    ),
    "ministral 3": lambda: causal("Ministral3", head_dim=16, rope_parameters=MINISTRAL3_ROPE),
    "qwen2-vl": lambda: multimodal(
        "Qwen2VL",
        "Qwen2VLForConditionalGeneration",
        {"rope_parameters": MROPE},
        {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2},
    ),
    "qwen2.5-vl": lambda: multimodal(
        "Qwen2_5_VL", "Qwen2_5_VLForConditionalGeneration", {"rope_parameters": MROPE}, QWEN_VISION
    ),
    "qwen3-vl": lambda: multimodal(
        "Qwen3VL",
        "Qwen3VLForConditionalGeneration",
        {"rope_parameters": MROPE | {"mrope_interleaved": True}, "head_dim": 16},
        QWEN3_VISION,
    ),
    "qwen3-vl moe": lambda: multimodal(
        "Qwen3VLMoe",
        "Qwen3VLMoeForConditionalGeneration",
        {"rope_parameters": MROPE | {"mrope_interleaved": True}, **EXPERTS},
        QWEN3_VISION,
    ),
    "llama": lambda: causal("Llama"),
    "llama, biased": lambda: causal("Llama", attention_bias=True, mlp_bias=True),
    "llama, biased in attention": lambda: causal(
        "Llama", attention_bias=True, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    ),
    "nemotron": lambda: causal("Nemotron", head_dim=8, attention_bias=True, mlp_bias=True),
    "arcee": lambda: causal("Arcee", mlp_bias=True),
    "falcon 7b": lambda: causal("Falcon", num_kv_heads=1, ffn_hidden_size=48),
    "falcon 40b": lambda: causal(
        "Falcon", new_decoder_architecture=True, num_kv_heads=2, bias=True, ffn_hidden_size=48
    ),
    "falcon 11b": lambda: causal(
        "Falcon",
        new_decoder_architecture=True,
        num_kv_heads=2,
        num_ln_in_parallel_attn=1,
        tie_word_embeddings=False,
        ffn_hidden_size=48,
    ),
    "falcon, one half after the other": lambda: causal(
        "Falcon", parallel_attn=False, multi_query=False, ffn_hidden_size=48
    ),
    "falcon-rw": lambda: causal(
        "Falcon", alibi=True, parallel_attn=False, multi_query=False, bias=True, ffn_hidden_size=48
    ),
    "bloom": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=96, n_head=6, n_layer=2)
    ),
    "mpt": lambda: transformers.MptForCausalLM(
        transformers.MptConfig(
            vocab_size=VOCAB_SIZE, d_model=96, n_heads=6, n_layers=2, max_seq_len=128, attn_config={"clip_qkv": 0.5}
        )
    ),
    "olmo 1": lambda: causal("Olmo", clip_qkv=0.5),
    "opt": lambda: causal("OPT", ffn_dim=48, word_embed_proj_dim=32, num_key_value_heads=None),
    "gpt-j": lambda: transformers.GPTJForCausalLM(
        transformers.GPTJConfig(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=2, n_positions=128, rotary_dim=8)
    ),
    "starcoder": lambda: transformers.GPTBigCodeForCausalLM(
        transformers.GPTBigCodeConfig(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    ),
    "santacoder without multi-query": lambda: transformers.GPTBigCodeForCausalLM(
        transformers.GPTBigCodeConfig(
            vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=128, multi_query=False
        )
    ),
    "qwen2 moe": lambda: causal("Qwen2Moe", **EXPERTS, shared_expert_intermediate_size=40, mlp_only_layers=[0]),
    "qwen2 moe, windows": lambda: causal(
        "Qwen2Moe",
        **EXPERTS,
        shared_expert_intermediate_size=40,
        use_sliding_window=True,
        sliding_window=8,
        norm_topk_prob=True,
    ),
    "olmoe": lambda: causal("Olmoe", num_experts=4, num_experts_per_tok=2, clip_qkv=0.8),
    "phi-3.5 moe": lambda: causal("Phimoe", num_local_experts=6, attention_bias=True, lm_head_bias=True),
    "ernie 4.5 moe": lambda: causal(
        "Ernie4_5_Moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=24, moe_num_shared_experts=2
    ),
    "granite moe": lambda: causal("GraniteMoe", num_local_experts=4, intermediate_size=16, **GRANITE),
    "granite moe with a shared expert": lambda: causal(
        "GraniteMoeShared", num_local_experts=4, shared_intermediate_size=24, **GRANITE
    ),
    "glm 4.5": lambda: causal("Glm4Moe", **DEEPSEEK, use_qk_norm=True, attention_bias=True, routed_scaling_factor=2.5),
    "dots1": lambda: causal("Dots1", **DEEPSEEK, num_hidden_layers=3, sliding_window=8, max_window_layers=2),
    "stablelm 2 12b": lambda: causal("StableLm", qk_layernorm=True, use_parallel_residual=True),
    "command r+": lambda: causal("Cohere", use_qk_norm=True, logit_scale=0.5),
    "deepseek v2-lite": lambda: causal("DeepseekV2", **LATENT | {"q_lora_rank": None}, rope_parameters=LATENT_YARN),
    "deepseek v2": lambda: causal(
        "DeepseekV2", **LATENT, topk_method="group_limited_greedy", n_group=3, topk_group=2, routed_scaling_factor=4.0
    ),
    "deepseek v3": lambda: causal(
        "DeepseekV3", **LATENT, n_group=3, topk_group=2, rope_parameters=LATENT_YARN | {"mscale": 0.707}
    ),
    "deepseek v3, halves rotate": lambda: causal(
        "DeepseekV3", **LATENT, n_group=1, topk_group=1, rope_interleave=False, norm_topk_prob=False
    ),
    "gpt-oss": lambda: causal("GptOss", **GPT_OSS),
    "minimax m2": lambda: causal(
        "MiniMaxM2", num_local_experts=4, num_experts_per_tok=2, head_dim=16, rotary_dim=8, **MINIMAX
    ),
}


def build(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(seeds.seed_of(name))
    model: transformers.PreTrainedModel = MODELS[name]().float().eval()
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            parameter.normal_(1.0 if is_gain(each) else 0.0, 0.3)
        for each, buffer in model.named_buffers():
            if each.endswith("correction_bias"):
                buffer.normal_(0.0, 0.3)
    return model


def check(model: transformers.PreTrainedModel, directory: Path) -> ModelSpec:
    """Compares logits of texts that are computed in chunks, in mixed batches."""
    ours = load(directory)
    texts = [torch.randint(VOCAB_SIZE, (length,)) for length in TEXT_LENS]
    run = PagedRun(ours, texts)
    for step in SCHEDULES["mixed batches"]:
        run.step(step)
    for text, parts in zip(texts, run.logits, strict=True):
        expected = assert_logits(torch.cat(parts), model, text)
        assert expected.std() > 0.3
    return ours.spec


# Put together of what other families have: left to the slow tests.
LIKE_OTHERS = (
    "llama",
    "llama, biased",
    "llama, biased in attention",
    "mistral small 3",
    "ministral 3",
    "qwen2-vl",
    "qwen3-vl",
    "arcee",
    "falcon 11b",
    "falcon, one half after the other",
    "santacoder without multi-query",
    "qwen2 moe, windows",
    "granite moe with a shared expert",
    "dots1",
    "deepseek v3, halves rotate",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LIKE_OTHERS)) for name in MODELS]
)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    check(model, tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_steps_of_decode_graphs_have_the_logits_of_the_hidden_states(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    ours, text = load(tmp_path), torch.randint(VOCAB_SIZE, (9,))
    with torch.inference_mode():
        torch.testing.assert_close(one_sequence.step_logits(ours, text), one_sequence.logits(ours, text))


def rename(directory: Path, renamed: Mapping[str, str], **config: Any) -> dict[str, torch.Tensor]:
    """Renames parts of tensor names and changes config.json; returns the tensors for further changes."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    tensors = load_file(directory / "model.safetensors")
    for old, new in renamed.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return tensors


@pytest.mark.parametrize("kind", ["origin", "dynamic"])
def test_internlm_1_is_a_llama_with_biases_in_its_attention(kind: str, tmp_path: Path) -> None:
    """Its configs have an object of their own for the rope, which is a plain one within the context."""
    model = build("llama, biased in attention")
    model.save_pretrained(tmp_path)
    rope = {"rope_parameters": None, "rope_theta": None, "rotary": {"base": 500.0, "type": kind}}
    rename(tmp_path, {}, architectures=["InternLMForCausalLM"], attention_bias=None, bias=True, **rope)
    assert check(model, tmp_path).family == "internlm"


def test_internlm_2_is_a_llama_with_fused_projections(tmp_path: Path) -> None:
    """There is no such model in transformers: its weights are a Llama's, stored in another way."""
    model = build("llama")
    model.save_pretrained(tmp_path)
    names = {"embed_tokens": "tok_embeddings", "lm_head": "output", "input_layernorm": "attention_norm"}
    names |= {"post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attention.wo"}
    names |= {"mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2"}
    tensors = rename(tmp_path, names, architectures=["InternLM2ForCausalLM"], bias=False)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        query, key, value = (tensors.pop(f"{prefix}self_attn.{part}_proj.weight") for part in "qkv")
        groups = [each.unflatten(0, (2, -1)) for each in (query, key, value)]  # one for each key-value head
        tensors[f"{prefix}attention.wqkv.weight"] = torch.cat(groups, dim=1).flatten(0, 1).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    assert check(model, tmp_path).family == "internlm2"


@pytest.mark.parametrize("source", ["safetensors", "gguf"])
@pytest.mark.parametrize("rotates", [True, False], ids=["7b", "13b"])
def test_baichuan_is_a_llama_with_a_rope_or_alibi_and_a_normed_head(
    rotates: bool, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no such model in transformers. At position 0 a rope does nothing; ALiBi is then a mask."""
    monkeypatch.setattr(dense_traits, "BAICHUAN_ROTATES", {TINY["hidden_size"]: rotates})
    monkeypatch.setattr(dense_traits, "BAICHUAN_2_VOCABULARY", VOCAB_SIZE)
    torch.manual_seed(5)
    model = causal("Llama", num_attention_heads=8, num_key_value_heads=8, head_dim=4).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(tmp_path)
    tensors = rename(tmp_path, {}, architectures=["BaichuanForCausalLM"])
    path = save_baichuan(tensors, tmp_path) if source == "gguf" else tmp_path
    for layer in range(2):
        parts = [tensors.pop(f"model.layers.{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
        tensors[f"model.layers.{layer}.self_attn.W_pack.weight"] = torch.cat(parts)
    save_file(tensors, tmp_path / "model.safetensors")
    ours = load_decoder(open_checkpoint(str(path)), dtype=torch.float32)
    text = torch.arange(40)
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.nn.functional.normalize(model.lm_head.weight))
        expected = model(text[None], **({} if rotates else alibi_inputs(40, 8))).logits[0]
    torch.testing.assert_close(logits(ours, text), expected, atol=2e-4, rtol=2e-4)
    assert expected.std() > 0.3


def alibi_inputs(length: int, num_heads: int) -> dict[str, torch.Tensor]:
    slopes = torch.tensor([2.0 ** -(head + 1) for head in range(num_heads)])  # of eight heads
    positions = torch.arange(length)
    distances = (positions[None] - positions[:, None]).float()
    mask = slopes[:, None, None] * distances + torch.triu(torch.full((length, length), -torch.inf), 1)
    return {"attention_mask": mask[None], "position_ids": torch.zeros(1, length, dtype=torch.int64)}


def save_baichuan(tensors: Mapping[str, torch.Tensor], directory: Path) -> Path:
    """As llama.cpp's converter writes it: queries and keys in the order for neighbouring pairs."""
    arrays = {gguf_name(name, "llama"): tensor.numpy() for name, tensor in tensors.items()}
    rotated = {name: interleave(each, 8) for name, each in arrays.items() if name.endswith(("_q.weight", "_k.weight"))}
    numbers = {key: TINY[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    numbers |= {"num_attention_heads": 8, "num_key_value_heads": 8}
    extra = {"baichuan.tensor_data_layout": "Meta AI original pth", "baichuan.rope.dimension_count": 4}
    return write(directory / "m.gguf", arrays | rotated, architecture="baichuan", extra=extra, **numbers)


def test_baichuan_of_another_size_is_refused() -> None:
    config = transformers.LlamaConfig(**TINY).to_dict() | {"architectures": ["BaichuanForCausalLM"]}
    with pytest.raises(UnsupportedModelError, match="hidden_size=32 is not supported: only the sizes of 7B and 13B"):
        spec_from_config(config)


def test_internlm_3_is_a_llama_with_biases(tmp_path: Path) -> None:
    model = build("llama, biased")
    model.save_pretrained(tmp_path)
    biases = {"attention_bias": None, "mlp_bias": None, "bias": True, "qkv_bias": True}
    rename(tmp_path, {}, architectures=["InternLM3ForCausalLM"], **biases)
    assert check(model, tmp_path).family == "internlm3"


def test_gemma_3n_is_read_from_a_multimodal_checkpoint(tmp_path: Path) -> None:
    """Its layers without keys have tensors for them too, which are not used."""
    model = build("gemma 3n")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": config, "model_type": "gemma3n"}
    tensors = {name.replace("model.", "model.language_model.", 1): each for name, each in rename(tmp_path, {}).items()}
    unused = {f"model.language_model.layers.5.self_attn.{name}_proj.weight": torch.ones(32, 32) for name in "kv"}
    save_file(tensors | unused | {"model.audio_tower.conv.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(whole))
    spec = check(model, tmp_path)
    assert spec.kv_elements_per_token == 4 * 2 * 2 * 16
    assert [spec.kv_source(layer) for layer in range(6)] == [None, None, None, None, 3, 2]


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    model = build("glm 4.5")
    model.save_pretrained(tmp_path)
    extra = {"model.layers.2.eh_proj.weight": torch.ones(32, 64), "model.layers.2.enorm.weight": torch.ones(32)}
    save_file(rename(tmp_path, {}) | extra, tmp_path / "model.safetensors")
    check(model, tmp_path)


def test_stacks_of_experts_are_read_upright_and_transposed(tmp_path: Path) -> None:
    """transformers 5 writes them upright; the published checkpoints of Qwen3-VL have them transposed."""
    model = build("qwen3-vl moe")
    model.save_pretrained(tmp_path)
    tensors = rename(tmp_path, {})
    stacks = {name: each.transpose(1, 2).contiguous() for name, each in tensors.items() if ".experts." in name}
    assert stacks
    save_file(tensors | stacks, tmp_path / "model.safetensors")
    check(model, tmp_path)
