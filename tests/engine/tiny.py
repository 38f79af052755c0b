"""Small models for the engine's tests: random weights saved by transformers, and a byte tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EOS = 0
SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA2 = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 24,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 10.0,
}
GEMMA3 = {
    "num_hidden_layers": 7,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 24,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}
GEMMA3N = {
    "num_hidden_layers": 5,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 320,  # all tokens: transformers before 5.18 reads past the end of a smaller table
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.8, 0.0, 0.0, 0.0, 0.0],
}
# Short and long factors are equal: transformers switches between them as a text grows, an engine cannot.
PHI4 = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.3, 1.7, 2.5, 4.0],
        "long_factor": [1.0, 1.1, 1.3, 1.7, 2.5, 4.0],
    },
    "original_max_position_embeddings": 64,
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
}
OLMO3 = {
    "num_hidden_layers": 4,
    "sliding_window": 24,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
# Four layers: one without rope, every other one with a mixture of experts.
LLAMA4 = {
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "intermediate_size_mlp": 96,
    "interleave_moe_layer_step": 2,
    "num_local_experts": 4,
    "attention_chunk_size": 24,
    "floor_scale": 16,
    "rope_parameters": LLAMA3_ROPE,
}
QWEN3_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True}


def _falcon_config(*, head_dim: int, **values: Any) -> transformers.FalconConfig:
    assert head_dim * values["num_attention_heads"] == values["hidden_size"]  # it cannot be set
    return transformers.FalconConfig(**values)


# Published configs have `rotary_dim` alone. transformers before 5.18 does not read it, and rotates whole heads.
MINIMAX_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}


def _bloom_config(**values: Any) -> transformers.BloomConfig:
    """Its MLP has four times the width; it has no key-value heads of its own."""
    keys = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "bos_token_id", "eos_token_id")
    return transformers.BloomConfig(**{key: values[key] for key in keys}, seq_length=values["max_position_embeddings"])


def _mpt_config(**values: Any) -> transformers.MptConfig:
    keys = {"d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
    keys |= {"max_seq_len": "max_position_embeddings"} | {key: key for key in ("vocab_size", "eos_token_id")}
    return transformers.MptConfig(**{key: values[name] for key, name in keys.items()}, attn_config={"clip_qkv": 3.0})


def _mamba2_config(**values: Any) -> transformers.Mamba2Config:
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "bos_token_id", "eos_token_id", "pad_token_id")
    names = (*names, "max_position_embeddings")
    # One group, since transformers norms several of them together.
    sizes = {"num_heads": 16, "head_dim": 12, "n_groups": 1, "state_size": 16}
    return transformers.Mamba2Config(**{name: values[name] for name in names}, **sizes)


# Each kind of layer, and one with attention where the family has it.
LFM2 = {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]}
FALCON_H1 = {"mamba_d_ssm": 192, "mamba_n_heads": 16, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 16}
FALCON_H1 |= {"ssm_in_multiplier": 0.7, "key_multiplier": 0.8, "attention_in_multiplier": 0.9}
NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "mamba_num_heads": 16,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 16,
    "n_routed_experts": 6,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 64,
}
GATED_DELTA = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
DELTA_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
DELTA_EXPERTS |= {"shared_expert_intermediate_size": 64}
LATENT: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT |= {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_key_value_heads": None}
LATENT |= {"q_lora_rank": 32, "kv_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 24}
FAMILIES: dict[str, tuple[Callable[..., Any], type[Any], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "llama3": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "llama4": (transformers.Llama4TextConfig, transformers.Llama4ForCausalLM, LLAMA4),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM, {"num_local_experts": 4}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": 24}),
    "ministral": (transformers.MinistralConfig, transformers.MinistralForCausalLM, {"sliding_window": 24}),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM, {"sliding_window": 24}),
    "phi4": (transformers.Phi3Config, transformers.Phi3ForCausalLM, PHI4),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM, QWEN3_MOE),
    "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM, {"no_rope_layer_interval": 2}),
    "granite": (transformers.GraniteConfig, transformers.GraniteForCausalLM, GRANITE),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM, {}),
    "olmo3": (transformers.Olmo3Config, transformers.Olmo3ForCausalLM, OLMO3),
    "glm": (transformers.GlmConfig, transformers.GlmForCausalLM, {}),
    "glm4": (transformers.Glm4Config, transformers.Glm4ForCausalLM, {}),
    "starcoder2": (transformers.Starcoder2Config, transformers.Starcoder2ForCausalLM, {"sliding_window": 24}),
    "gpt_neox": (transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM, {"num_key_value_heads": None}),
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel, {"num_key_value_heads": None}),
    "phi": (transformers.PhiConfig, transformers.PhiForCausalLM, {}),
    "stablelm": (transformers.StableLmConfig, transformers.StableLmForCausalLM, {}),
    "seed_oss": (transformers.SeedOssConfig, transformers.SeedOssForCausalLM, {}),
    "ernie4_5": (transformers.Ernie4_5Config, transformers.Ernie4_5ForCausalLM, {}),
    "exaone4": (
        transformers.Exaone4Config,
        transformers.Exaone4ForCausalLM,
        {"sliding_window": 24, "sliding_window_pattern": 2},
    ),
    "stablelm_12b": (
        transformers.StableLmConfig,
        transformers.StableLmForCausalLM,
        {"qk_layernorm": True, "use_parallel_residual": True},
    ),
    "cohere": (transformers.CohereConfig, transformers.CohereForCausalLM, {}),
    "command_r_plus": (transformers.CohereConfig, transformers.CohereForCausalLM, {"use_qk_norm": True}),
    "cohere2": (
        transformers.Cohere2Config,
        transformers.Cohere2ForCausalLM,
        {"sliding_window": 24, "sliding_window_pattern": 2},
    ),
    "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM, {}),
    "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM, GEMMA2),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM, GEMMA3),
    "gemma3n": (transformers.Gemma3nTextConfig, transformers.Gemma3nForCausalLM, GEMMA3N),
    "ministral3": (
        transformers.Ministral3Config,
        transformers.Ministral3ForCausalLM,
        {"rope_parameters": LLAMA3_ROPE | {"llama_4_scaling_beta": 0.2}},
    ),
    "nemotron": (transformers.NemotronConfig, transformers.NemotronForCausalLM, {}),
    "arcee": (transformers.ArceeConfig, transformers.ArceeForCausalLM, {}),
    "falcon": (
        _falcon_config,
        transformers.FalconForCausalLM,
        {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96},
    ),
    "falcon_rw": (
        _falcon_config,
        transformers.FalconForCausalLM,
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, "ffn_hidden_size": 96},
    ),
    "bloom": (_bloom_config, transformers.BloomForCausalLM, {}),
    "mpt": (_mpt_config, transformers.MptForCausalLM, {}),
    "olmo": (transformers.OlmoConfig, transformers.OlmoForCausalLM, {"clip_qkv": 1.5}),
    "opt": (
        transformers.OPTConfig,
        transformers.OPTForCausalLM,
        {"ffn_dim": 96, "word_embed_proj_dim": 96, "num_key_value_heads": None},
    ),
    "gptj": (transformers.GPTJConfig, transformers.GPTJForCausalLM, {"rotary_dim": 8, "num_key_value_heads": None}),
    "gpt_bigcode": (transformers.GPTBigCodeConfig, transformers.GPTBigCodeForCausalLM, {"num_key_value_heads": None}),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        transformers.Qwen2MoeForCausalLM,
        QWEN3_MOE | {"shared_expert_intermediate_size": 64},
    ),
    "olmoe": (transformers.OlmoeConfig, transformers.OlmoeForCausalLM, {"num_experts": 6, "num_experts_per_tok": 2}),
    "phimoe": (transformers.PhimoeConfig, transformers.PhimoeForCausalLM, {"num_local_experts": 6}),
    "ernie4_5_moe": (
        transformers.Ernie4_5_MoeConfig,
        transformers.Ernie4_5_MoeForCausalLM,
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 48},
    ),
    "granitemoe": (
        transformers.GraniteMoeConfig,
        transformers.GraniteMoeForCausalLM,
        GRANITE | {"num_local_experts": 6},
    ),
    "granitemoeshared": (
        transformers.GraniteMoeSharedConfig,
        transformers.GraniteMoeSharedForCausalLM,
        GRANITE | {"num_local_experts": 6, "shared_intermediate_size": 64},
    ),
    "dots1": (
        transformers.Dots1Config,
        transformers.Dots1ForCausalLM,
        {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1}
        | {"first_k_dense_replace": 1, "sliding_window": 24, "max_window_layers": 2},
    ),
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        transformers.Glm4MoeForCausalLM,
        {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "use_qk_norm": True},
    ),
    "deepseek_v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM, LATENT | {"q_lora_rank": None}),
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM, LATENT),
    "gpt_oss": (
        transformers.GptOssConfig,
        transformers.GptOssForCausalLM,
        {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 24, "rope_parameters": LLAMA3_ROPE},
    ),
    "minimax_m2": (
        transformers.MiniMaxM2Config,
        transformers.MiniMaxM2ForCausalLM,
        {"num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8, "rope_parameters": MINIMAX_ROPE},
    ),
    "lfm2": (transformers.Lfm2Config, transformers.Lfm2ForCausalLM, LFM2),
    "mamba2": (_mamba2_config, transformers.Mamba2ForCausalLM, {}),
    "falcon_h1": (transformers.FalconH1Config, transformers.FalconH1ForCausalLM, FALCON_H1),
    "nemotron_h": (transformers.NemotronHConfig, transformers.NemotronHForCausalLM, NEMOTRON_H),
    "qwen3_next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM, GATED_DELTA | DELTA_EXPERTS),
    "qwen3_5": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM, GATED_DELTA),
    "qwen3_5_moe": (
        transformers.Qwen3_5MoeTextConfig,
        transformers.Qwen3_5MoeForCausalLM,
        GATED_DELTA | DELTA_EXPERTS,
    ),
}
HYBRIDS = (
    "lfm2",
    "mamba2",
    "falcon_h1",
    "nemotron_h",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
)  # they have a recurrent state
# Put together of what the others have, one by one: left to the slow tests of the whole engine. The logits of all
# families are compared with those of transformers by default.
LIKE_OTHERS = {"llama3", "ministral", "phi", "phi4", "olmo3", "glm", "stablelm", "seed_oss", "ernie4_5", "exaone4"} | {
    "cohere2",
    "gemma",
    "mixtral",
    "ministral3",
    "nemotron",
    "arcee",
    "falcon",
    "olmo",
    "opt",
    "gptj",
    "gpt_bigcode",
    "qwen2_moe",
    "olmoe",
    "phimoe",
    "ernie4_5_moe",
    "granitemoe",
    "glm4_moe",
    "minimax_m2",
    "deepseek_v2",
    "gpt_oss",
    "falcon_rw",
    "gemma3n",
    "mpt",
    "mamba2",
    "falcon_h1",
    "nemotron_h",
    "qwen3_5",
    "qwen3_5_moe",
    "stablelm_12b",
    "command_r_plus",
    "granitemoeshared",
    "dots1",
}
DIVIDED = [name for name in FAMILIES if name not in ("gemma3n", *HYBRIDS)]  # those that run on several ranks
MIXTURES = (
    "llama4",
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "olmoe",
    "phimoe",
    "ernie4_5_moe",
    "granitemoe",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "minimax_m2",
    "nemotron_h",
    "qwen3_next",
    "qwen3_5_moe",
    "granitemoeshared",
    "dots1",
)
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}<tool {{ tool.function.name }}>\n{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_model(directory: Path, family: str = "llama") -> transformers.PreTrainedModel:
    """Save a model with weights large enough that greedy choices are not near-ties."""
    config_class, model_class, extra = FAMILIES[family]
    torch.manual_seed(11)
    model = model_class(config_class(**SHAPE | extra)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and ".ln_" not in name:
                parameter.normal_(0, 0.25)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return model


def save_tokenizer(directory: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": EOS} | {character: i + 1 for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<eos>", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def greedy(model: transformers.PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Decode one request greedily, recomputing the whole context for every token."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
