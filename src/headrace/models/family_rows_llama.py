"""Rows of Llama and of the families that are variations of it."""

from __future__ import annotations

from collections.abc import Collection

from headrace.models import traits
from headrace.models.family import Config, Family
from headrace.models.family_rows_dense import QKV
from headrace.models.family_rows_mixtures import EXPERT_COUNTS, GRANITE_GGUF_KEYS, GRANITE_MULTIPLIERS, MIXTRAL_NAMES
from headrace.models.stored_tensors import IMAGES, TEXT_MODEL, Stored

_FUSED_QKV: dict[str, tuple[str, ...]] = {"self_attn.qkv_proj": QKV}
_FUSED_GATE_UP: dict[str, tuple[str, ...]] = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
_OLMO2_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279}
_GLM_KEYS = frozenset({"attention_bias", "partial_rotary_factor"})
_GLM_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
}
_COHERE_DEFAULTS = {
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "eos_token_id": 255001,
    "bos_token_id": 5,
}
_LLAMA4_NAMES = {
    "mlp.gate_proj": "feed_forward.gate_proj",
    "mlp.up_proj": "feed_forward.up_proj",
    "mlp.down_proj": "feed_forward.down_proj",
    "mlp.router": "feed_forward.router",
    "mlp.experts.*.down_proj": "feed_forward.experts.down_proj",
    "mlp.shared_expert.gate_proj": "feed_forward.shared_expert.gate_proj",
    "mlp.shared_expert.up_proj": "feed_forward.shared_expert.up_proj",
    "mlp.shared_expert.down_proj": "feed_forward.shared_expert.down_proj",
}


def _stablelm_norms(tensors: Collection[str]) -> Config:
    return {
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in tensors,
    }


def _cohere_norms(tensors: Collection[str]) -> Config:
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in tensors}


def _ministral3_yarn(values: Config) -> Config:
    """Files do not state `mscale`; llama.cpp takes 1."""
    return {
        "mscale": 1.0,
        "mscale_all_dim": values.get("rope.scaling.yarn_log_multiplier"),
        "llama_4_scaling_beta": values.get("attention.temperature_scale"),
    }


LLAMA = (
    Family(
        name="llama",
        models="Llama 1 to 3.3, SmolLM 1 and 2, Yi, Falcon 3, DeepSeek-R1-Distill-Llama",
        architectures=("LlamaForCausalLM",),
        gguf_architectures=("llama",),
        traits=traits.llama,
        reads=frozenset({"attention_bias", "mlp_bias"}),
        defaults={"max_position_embeddings": 2048},
        gguf_rotates_pairs=True,
    ),
    Family(
        name="llama4_text",  # llama4 is the multimodal model
        models="Llama 4 Scout and Maverick (the text model)",
        architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
        gguf_architectures=("llama4",),
        traits=traits.llama4,
        reads=frozenset(
            {
                "attention_bias",
                "attention_chunk_size",
                "attn_scale",
                "attn_temperature_tuning",
                "floor_scale",
                "interleave_moe_layer_step",
                "layer_types",
                "moe_intermediate_size",
                "moe_layers",
                "no_rope_layer_interval",
                "no_rope_layers",
                "num_experts_per_tok",
                "num_local_experts",
                "use_qk_norm",
            }
        ),
        renamed={"intermediate_size": "moe_intermediate_size", "intermediate_size_mlp": "intermediate_size"},
        defaults={
            "intermediate_size": 16384,
            "moe_intermediate_size": 8192,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "no_rope_layer_interval": 4,
            "use_qk_norm": True,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
        stored=Stored(
            prefix="language_model.",
            names=_LLAMA4_NAMES,
            fused={"feed_forward.experts.gate_up_proj": ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj")},
            leftovers=IMAGES,
        ),
        gguf_keys=EXPERT_COUNTS
        | {
            "expert_feed_forward_length": "moe_intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
            "attention.sliding_window": "attention_chunk_size",
        },
    ),
    Family(
        name="mistral",
        models="Mistral 7B, Nemo, Small and Large, Ministral 8B, Codestral",
        architectures=("MistralForCausalLM",),
        gguf_architectures=(),  # stored as llama
        traits=traits.mistral,
        reads=frozenset({"sliding_window"}),
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    Family(
        name="ministral3",
        models="Mistral Small 3.1 and later, Ministral 3, Devstral Small 2 (the text models)",
        architectures=("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
        gguf_architectures=("mistral3",),
        traits=traits.ministral3,
        reads=frozenset({"sliding_window"}),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
        rope_keys=frozenset({"llama_4_scaling_beta", "max_position_embeddings"}),
        stored=TEXT_MODEL,
        gguf_reads=frozenset({"rope.scaling.yarn_log_multiplier", "attention.temperature_scale"}),
        gguf_yarn=_ministral3_yarn,
        gguf_rotates_pairs=True,
    ),
    Family(
        name="ministral",
        models="Ministral, with windows by layer",
        architectures=("MinistralForCausalLM",),
        gguf_architectures=(),
        traits=traits.ministral,
        reads=frozenset({"sliding_window", "layer_types"}),
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    Family(
        name="mixtral",
        models="Mixtral 8x7B and 8x22B",
        architectures=("MixtralForCausalLM",),
        gguf_architectures=("llama",),
        traits=traits.mixtral,
        reads=frozenset({"sliding_window", "num_local_experts", "num_experts_per_tok"}),
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
        stored=Stored(names=MIXTRAL_NAMES),
        gguf_keys=EXPERT_COUNTS,
        gguf_mark="expert_count",
        gguf_rotates_pairs=True,
    ),
    Family(
        name="phi3",
        models="Phi-3, 3.5 and 4 (mini, medium, 14B)",
        architectures=("Phi3ForCausalLM",),
        gguf_architectures=("phi3",),
        traits=traits.mistral,
        reads=frozenset({"sliding_window", "partial_rotary_factor", "full_attn_mod"}),
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "sliding_window": None,
            "eos_token_id": 32000,
            "bos_token_id": 1,
        },
        stored=Stored(fused=_FUSED_QKV | _FUSED_GATE_UP),
        gguf_keys={"attention.sliding_window": "sliding_window"},
    ),
    Family(
        name="smollm3",
        models="SmolLM3",
        architectures=("SmolLM3ForCausalLM",),
        gguf_architectures=("smollm3",),
        traits=traits.smollm3,
        reads=frozenset(
            {
                "attention_bias",
                "mlp_bias",
                "no_rope_layers",
                "no_rope_layer_interval",
                "max_window_layers",  # in configs, but without effect
                "use_sliding_window",
                "sliding_window",
                "layer_types",
            }
        ),
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2_000_000.0,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
            "eos_token_id": 128001,
            "bos_token_id": 128000,
        },
        gguf_rotates_pairs=True,
    ),
    Family(
        name="granite",
        models="Granite 3 (the dense ones)",
        architectures=("GraniteForCausalLM",),
        gguf_architectures=("granite",),
        traits=traits.granite,
        reads=GRANITE_MULTIPLIERS | {"attention_bias", "mlp_bias"},
        defaults=dict.fromkeys(GRANITE_MULTIPLIERS, 1.0)
        | {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "eos_token_id": 2, "bos_token_id": 1},
        gguf_keys=GRANITE_GGUF_KEYS,
        gguf_rotates_pairs=True,
    ),
    Family(
        name="olmo2",
        models="OLMo 2",
        architectures=("Olmo2ForCausalLM",),
        gguf_architectures=("olmo2",),
        traits=traits.olmo2,
        reads=frozenset({"attention_bias"}),
        defaults=_OLMO2_DEFAULTS,
    ),
    Family(
        name="olmo3",
        models="OLMo 3",
        architectures=("Olmo3ForCausalLM",),
        gguf_architectures=("olmo2",),
        traits=traits.olmo3,
        reads=frozenset(
            {"attention_bias", "sliding_window", "sliding_window_pattern", "layer_types", "rope_local_base_freq"}
        ),
        defaults=_OLMO2_DEFAULTS | {"rope_theta": 500_000.0, "sliding_window": 4096, "sliding_window_pattern": 4},
        has_local_rope=True,
        gguf_keys={
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": "sliding_window_pattern",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        gguf_mark="attention.sliding_window",
    ),
    Family(
        name="glm",
        models="GLM-4 9B (2024), GLM-Edge",
        architectures=("GlmForCausalLM",),
        gguf_architectures=("chatglm",),
        traits=traits.glm,
        reads=_GLM_KEYS,
        defaults=_GLM_DEFAULTS,
        stored=Stored(fused=_FUSED_GATE_UP),
    ),
    Family(
        name="glm4",
        models="GLM-4 9B and 32B (0414), GLM-Z1",
        architectures=("Glm4ForCausalLM",),
        gguf_architectures=("glm4",),
        traits=traits.glm4,
        reads=_GLM_KEYS,
        defaults=_GLM_DEFAULTS,
        stored=Stored(
            names={
                "post_attention_layernorm": "post_self_attn_layernorm",
                "pre_feedforward_layernorm": "post_attention_layernorm",
                "post_feedforward_layernorm": "post_mlp_layernorm",
            },
            fused=_FUSED_GATE_UP,
        ),
    ),
    Family(
        name="starcoder2",
        models="StarCoder2",
        architectures=("Starcoder2ForCausalLM",),
        gguf_architectures=("starcoder2",),
        traits=traits.starcoder2,
        reads=frozenset(
            {
                "sliding_window",
                "use_bias",
                "norm_type",
                "attention_softmax_in_fp32",  # always the case here
                "scale_attention_softmax_in_fp32",
            }
        ),
        renamed={"norm_epsilon": "rms_norm_eps"},
        defaults={
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "sliding_window": None,
            "use_bias": True,
            "norm_type": "layer_norm",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "eos_token_id": 50256,
            "bos_token_id": 50256,
        },
        implies={"scale_attn_weights": True},
        activations=("gelu_pytorch_tanh",),
        stored=Stored(names={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}),
        gguf_keys={"attention.sliding_window": "sliding_window"},
    ),
    Family(
        name="stablelm",
        models="StableLM 2 (1.6B and 12B)",
        architectures=("StableLmForCausalLM",),
        gguf_architectures=("stablelm",),
        traits=traits.stablelm,
        reads=frozenset({"partial_rotary_factor", "use_qkv_bias", "qk_layernorm"}),
        renamed={"layer_norm_eps": "rms_norm_eps"},
        stored=Stored(names={"self_attn.q_norm": "self_attn.q_layernorm", "self_attn.k_norm": "self_attn.k_layernorm"}),
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 0,
            "bos_token_id": 0,
        },
        gguf_keys={"use_parallel_residual": "use_parallel_residual"},
        gguf_tells=_stablelm_norms,
    ),
    Family(
        name="seed_oss",
        models="Seed-OSS",
        architectures=("SeedOssForCausalLM",),
        gguf_architectures=("seed_oss",),
        traits=traits.seed_oss,
        reads=frozenset({"attention_bias", "attention_out_bias", "mlp_bias"}),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
            "eos_token_id": 2,
            "bos_token_id": 0,
        },
    ),
    Family(
        name="ernie4_5",
        models="ERNIE 4.5 (the dense ones)",
        architectures=("Ernie4_5ForCausalLM",),
        gguf_architectures=("ernie4_5",),
        traits=traits.ernie4_5,
        reads=frozenset({"use_bias"}),
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
    ),
    Family(
        name="exaone4",
        models="EXAONE 4.0",
        architectures=("Exaone4ForCausalLM",),
        gguf_architectures=("exaone4",),
        traits=traits.exaone4,
        reads=frozenset({"sliding_window", "sliding_window_pattern", "layer_types"}),
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "eos_token_id": 2,
            "bos_token_id": 0,
        },
        gguf_keys={
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": "sliding_window_pattern",
        },
        gguf_implies={"sliding_window": None},
    ),
    Family(
        name="cohere",
        models="Command R and R+, Aya 23, Aya Expanse",
        architectures=("CohereForCausalLM",),
        gguf_architectures=("command-r",),
        traits=traits.cohere,
        reads=frozenset({"attention_bias", "logit_scale", "use_qk_norm"}),
        renamed={"layer_norm_eps": "rms_norm_eps"},
        defaults=_COHERE_DEFAULTS | {"rope_theta": 500_000.0},
        gguf_keys={"logit_scale": "logit_scale"},
        gguf_tells=_cohere_norms,
    ),
    Family(
        name="cohere2",
        models="Command R7B, Command A",
        architectures=("Cohere2ForCausalLM",),
        gguf_architectures=("cohere2",),
        traits=traits.cohere2,
        reads=frozenset(
            {
                "attention_bias",
                "logit_scale",
                "sliding_window",
                "sliding_window_pattern",
                "_sliding_window_pattern",
                "layer_types",
            }
        ),
        renamed={"layer_norm_eps": "rms_norm_eps", "rotary_pct": "partial_rotary_factor"},
        defaults=_COHERE_DEFAULTS | {"sliding_window": 4096, "sliding_window_pattern": 4},
        gguf_keys={"logit_scale": "logit_scale", "attention.sliding_window": "sliding_window"},
    ),
)
