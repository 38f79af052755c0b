"""Rows of families with a mixture of experts, besides those of Llama 4, Mixtral and Qwen 3."""

from __future__ import annotations

from collections.abc import Collection

from headrace.models import mixture_traits as traits
from headrace.models.family import Config, Family
from headrace.models.stored_tensors import Stored

_EXPERTS = frozenset({"num_local_experts", "num_experts_per_tok"})
_ROUTED = _EXPERTS | {"moe_intermediate_size", "norm_topk_prob"}
_DEEPSEEK = _ROUTED | {"n_shared_experts", "routed_scaling_factor", "n_group", "topk_group", "first_k_dense_replace"}
# Keys of GGUF metadata.
EXPERT_COUNTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_EXPERT_SIZES = EXPERT_COUNTS | {"expert_feed_forward_length": "moe_intermediate_size"}
_SIGMOID = {"expert_gating_func": 2}
_DEEPSEEK_GGUF_KEYS = {
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_gating_func": "expert_gating_func",
}
_SHARED_EXPERTS = {
    f"mlp.shared_expert.{part}_proj": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}
_LATENT = _DEEPSEEK | {"q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "rope_interleave", "partial_rotary_factor"}
_LATENT_NAMES = {"self_attn.kv_a_proj": "self_attn.kv_a_proj_with_mqa"}
_LATENT_DEFAULTS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
}
_CORRECTION = {"mlp.router_correction": "mlp.gate.e_score_correction_bias"}
MIXTRAL_NAMES = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.*.gate_proj": "block_sparse_moe.experts.*.w1",
    "mlp.experts.*.down_proj": "block_sparse_moe.experts.*.w2",
    "mlp.experts.*.up_proj": "block_sparse_moe.experts.*.w3",
}
GRANITE_GGUF_KEYS = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
GRANITE_MULTIPLIERS = frozenset(GRANITE_GGUF_KEYS.values())
_GRANITE_STORED = Stored(
    names={
        "mlp.router": "block_sparse_moe.router.layer",
        "mlp.experts.*.down_proj": "block_sparse_moe.output_linear.weight",
        "mlp.shared_expert.down_proj": "shared_mlp.output_linear",
    },
    fused={
        "block_sparse_moe.input_linear.weight": ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj"),
        "shared_mlp.input_linear": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    },
    has_upright_stacks=True,
)
_GRANITE_DEFAULTS = dict.fromkeys(GRANITE_MULTIPLIERS, 1.0) | {
    "max_position_embeddings": 2048,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def _latent_heads(config: Config) -> Config:
    """Adds the sizes of a whole query or key head. Configs state its parts; their `head_dim` is that of one part."""
    still_dim, rotary_dim = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    sizes = {"head_dim": still_dim + rotary_dim, "rotary_dim": rotary_dim}
    return {**config, **sizes, "num_key_value_heads": 1}  # the latents, which all query heads share


_LATENT_GGUF_KEYS = {
    "attention.kv_lora_rank": "kv_lora_rank",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "rope.dimension_count": "qk_rope_head_dim",
}
_LATENT_GGUF_READS = frozenset(
    {
        "attention.q_lora_rank",
        "attention.key_length_mla",
        "attention.value_length_mla",
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
        "expert_group_count",
        "expert_group_used_count",
        "rope.scaling.yarn_log_multiplier",
    }
)
_EXPERTS_OF_V3 = 256


def _latent_yarn(values: Config) -> Config:
    """Files state `mscale_all_dim` alone, which `mscale` then equals."""
    return {"attention_factor": 1.0}


def _untruncated_yarn(values: Config) -> Config:
    return {"truncate": False}


def _latent_of_gguf(values: Config) -> Config:
    """Files from before April 2025 state the length of a whole head, later ones that of the latents beside it."""
    key_len = values.get("attention.key_length_mla", values.get("attention.key_length")) or 0
    return {
        "q_lora_rank": values.get("attention.q_lora_rank"),
        "qk_nope_head_dim": key_len - (values.get("rope.dimension_count") or 0),
        "v_head_dim": values.get("attention.value_length_mla", values.get("attention.value_length")),
        "routed_scaling_factor": values.get("expert_weights_scale", 1.0),
        "partial_rotary_factor": None,
    }


def _deepseek_v2_of_gguf(values: Config) -> Config:
    num_groups = values.get("expert_group_count") or 1
    method = "group_limited_greedy" if num_groups > 1 else "greedy"
    groups = {"n_group": num_groups, "topk_group": values.get("expert_group_used_count")}
    return {**_latent_of_gguf(values), **groups, "topk_method": method}


def _deepseek_v3_of_gguf(values: Config) -> Config:
    """Older files do not state the groups of experts. V3 and R1 have eight, others of this shape have one."""
    num_groups, num_chosen = values.get("expert_group_count"), values.get("expert_group_used_count")
    if num_groups is None:
        num_groups, num_chosen = (8, 4) if values.get("expert_count") == _EXPERTS_OF_V3 else (1, 1)
    groups = {"n_group": num_groups, "topk_group": num_chosen}
    return {**_latent_of_gguf(values), **groups, "norm_topk_prob": bool(values.get("expert_weights_norm"))}


def _phi_rope(config: Config) -> Config:
    """Reads the factors of cosines and sines, which must be the same for short and long contexts."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    values = dict(config.get(key) or {})
    short, long = values.pop("short_mscale", None), values.pop("long_mscale", None)
    if short is None or short != long:
        return config
    return {**config, key: values | {"attention_factor": short}}


def _phi_head(tensors: Collection[str]) -> Config:
    return {"lm_head_bias": "output.bias" in tensors}


def _glm_norms(tensors: Collection[str]) -> Config:
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in tensors}


MIXTURES = (
    Family(
        name="qwen2_moe",
        models="Qwen1.5-MoE, Qwen2 57B-A14B",
        architectures=("Qwen2MoeForCausalLM",),
        gguf_architectures=("qwen2moe",),
        traits=traits.qwen2_moe,
        reads=_ROUTED
        | {
            "use_sliding_window",
            "sliding_window",
            "max_window_layers",
            "layer_types",
            "qkv_bias",
            "shared_expert_intermediate_size",
        },
        renamed={"num_experts": "num_local_experts"},
        defaults={
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "decoder_sparse_step": 1,
            "num_local_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "norm_topk_prob": False,
            "qkv_bias": True,
        },
        stored=Stored(names={"mlp.router": "mlp.gate"}),
        gguf_keys=EXPERT_COUNTS
        | {
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
    ),
    Family(
        name="olmoe",
        models="OLMoE 1B-7B",
        architectures=("OlmoeForCausalLM",),
        gguf_architectures=("olmoe",),
        traits=traits.olmoe,
        reads=_EXPERTS | {"attention_bias", "clip_qkv", "norm_topk_prob"},
        renamed={"num_experts": "num_local_experts"},
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "eos_token_id": 50279,
        },
        stored=Stored(names={"mlp.router": "mlp.gate"}),
        gguf_keys=EXPERT_COUNTS,
    ),
    Family(
        name="phimoe",
        models="Phi-3.5-MoE, Phi-mini-MoE",
        architectures=("PhimoeForCausalLM", "PhiMoEForCausalLM"),
        gguf_architectures=("phimoe",),
        traits=traits.phimoe,
        reads=_EXPERTS | {"attention_bias", "lm_head_bias", "sliding_window", "router_jitter_noise"},
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
            "num_local_experts": 16,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.01,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
        derived=_phi_rope,
        stored=Stored(names=MIXTRAL_NAMES),
        gguf_keys=EXPERT_COUNTS | {"attention.sliding_window": "sliding_window"},
        gguf_tells=_phi_head,
    ),
    Family(
        name="ernie4_5_moe",
        models="ERNIE 4.5 21B-A3B and 300B-A47B",
        architectures=("Ernie4_5_MoeForCausalLM",),
        gguf_architectures=("ernie4_5-moe",),
        traits=traits.ernie4_5_moe,
        reads=_EXPERTS
        | {
            "use_bias",
            "moe_intermediate_size",
            "moe_num_shared_experts",
            "moe_layer_start_index",
            "moe_layer_end_index",
            "moe_layer_interval",
            "moe_norm_min",  # of a sum that is never so small
            "moe_capacity",  # of training
            "expert_shared_feed_forward_length",  # of GGUF files: follows from the sizes of experts
        },
        renamed={"moe_num_experts": "num_local_experts", "moe_k": "num_experts_per_tok"},
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
            "num_local_experts": 64,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
        implies={"moe_use_aux_free": True},
        stored=Stored(
            names={
                "mlp.router": "mlp.gate",
                "mlp.router_correction": "mlp.moe_statics.e_score_correction_bias",
                **_SHARED_EXPERTS,
            },
            leftovers=r"model\.mtp_.*",
            has_extra_layers=True,
        ),
        gguf_keys=_EXPERT_SIZES,
        gguf_further={
            "expert_shared_count": "moe_num_shared_experts",
            "expert_shared_feed_forward_length": "expert_shared_feed_forward_length",
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
    ),
    Family(
        name="granitemoe",
        models="Granite 3 1B-A400M and 3B-A800M",
        architectures=("GraniteMoeForCausalLM",),
        gguf_architectures=("granitemoe",),
        traits=traits.granite_moe,
        reads=_EXPERTS | {"attention_bias", *GRANITE_MULTIPLIERS},
        defaults=_GRANITE_DEFAULTS,
        stored=_GRANITE_STORED,
        gguf_keys=EXPERT_COUNTS | GRANITE_GGUF_KEYS,
        gguf_rotates_pairs=True,
    ),
    Family(
        name="granitemoeshared",
        models="Granite MoE with a shared expert",
        architectures=("GraniteMoeSharedForCausalLM",),
        gguf_architectures=("granitemoe",),
        traits=traits.granite_moe,
        reads=_EXPERTS | {"attention_bias", "shared_intermediate_size", *GRANITE_MULTIPLIERS},
        defaults=_GRANITE_DEFAULTS,
        stored=_GRANITE_STORED,
        gguf_mark="expert_shared_feed_forward_length",
        gguf_keys=EXPERT_COUNTS | GRANITE_GGUF_KEYS | {"expert_shared_feed_forward_length": "shared_intermediate_size"},
        gguf_rotates_pairs=True,
    ),
    Family(
        name="glm4_moe",
        models="GLM-4.5, 4.5-Air, 4.6 and 4.7",
        architectures=("Glm4MoeForCausalLM",),
        gguf_architectures=("glm4moe",),
        traits=traits.glm4_moe,
        reads=_DEEPSEEK | {"attention_bias", "use_qk_norm", "partial_rotary_factor"},
        renamed={"n_routed_experts": "num_local_experts"},
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        implies=_SIGMOID,
        stored=Stored(names={"mlp.router": "mlp.gate", **_CORRECTION, **_SHARED_EXPERTS}, has_extra_layers=True),
        gguf_keys=_EXPERT_SIZES,
        gguf_further=_DEEPSEEK_GGUF_KEYS,
        gguf_tells=_glm_norms,
    ),
    Family(
        name="dots1",
        models="dots.llm1",
        architectures=("Dots1ForCausalLM",),
        gguf_architectures=("dots1",),
        traits=traits.dots1,
        reads=_DEEPSEEK | {"attention_bias", "sliding_window", "max_window_layers", "layer_types"},
        renamed={"n_routed_experts": "num_local_experts"},
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
        },
        implies={"scoring_func": "noaux_tc"} | _SIGMOID,
        stored=Stored(names={"mlp.router": "mlp.gate", **_CORRECTION, **_SHARED_EXPERTS}),
        gguf_keys=_EXPERT_SIZES,
        gguf_further=_DEEPSEEK_GGUF_KEYS,
    ),
    Family(
        name="deepseek_v2",
        models="DeepSeek V2, V2-Lite and Coder V2",
        architectures=("DeepseekV2ForCausalLM",),
        gguf_architectures=("deepseek2",),
        traits=traits.deepseek_v2,
        reads=(_LATENT - {"norm_topk_prob"}) | {"topk_method"},
        renamed={"n_routed_experts": "num_local_experts"},
        defaults=_LATENT_DEFAULTS
        | {
            "max_position_embeddings": 2048,
            "moe_intermediate_size": 1407,
            "num_local_experts": 64,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
        derived=_latent_heads,
        implies={"moe_layer_freq": 1},
        stored=Stored(names={"mlp.router": "mlp.gate", **_LATENT_NAMES, **_SHARED_EXPERTS}),
        gguf_keys=_EXPERT_SIZES,
        gguf_further=_LATENT_GGUF_KEYS,
        gguf_reads=_LATENT_GGUF_READS - {"expert_weights_norm"},
        gguf_computes=_deepseek_v2_of_gguf,
        gguf_yarn=_latent_yarn,
    ),
    Family(
        name="deepseek_v3",
        models="DeepSeek V3 and R1, Kimi K2 (unquantized)",
        architectures=("DeepseekV3ForCausalLM",),
        gguf_architectures=("deepseek2",),
        traits=traits.deepseek_v3,
        reads=_LATENT,
        renamed={"n_routed_experts": "num_local_experts"},
        defaults=_LATENT_DEFAULTS
        | {
            "max_position_embeddings": 4096,
            "moe_intermediate_size": 2048,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "eos_token_id": 1,
            "bos_token_id": 0,
        },
        derived=_latent_heads,
        implies={"moe_layer_freq": 1},
        stored=Stored(
            names={"mlp.router": "mlp.gate", **_LATENT_NAMES, **_CORRECTION, **_SHARED_EXPERTS}, has_extra_layers=True
        ),
        gguf_mark="expert_gating_func",
        gguf_mark_value=_SIGMOID["expert_gating_func"],
        gguf_keys=_EXPERT_SIZES,
        gguf_further=_LATENT_GGUF_KEYS,
        gguf_reads=_LATENT_GGUF_READS,
        gguf_computes=_deepseek_v3_of_gguf,
        gguf_yarn=_latent_yarn,
    ),
    Family(
        name="gpt_oss",
        models="gpt-oss 20B and 120B",
        architectures=("GptOssForCausalLM",),
        gguf_architectures=("gpt-oss",),
        traits=traits.gpt_oss,
        reads=_EXPERTS | {"attention_bias", "sliding_window", "layer_types"},
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "attention_bias": True,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
        },
        quantizations=frozenset({"mxfp4"}),
        stored=Stored(
            names={
                "mlp.experts.*.gate_up_proj": "mlp.experts.gate_up_proj",
                "mlp.experts.*.down_proj": "mlp.experts.down_proj",
            }
        ),
        gguf_keys=EXPERT_COUNTS
        | {"expert_feed_forward_length": "intermediate_size", "attention.sliding_window": "sliding_window"},
        gguf_yarn=_untruncated_yarn,
    ),
    Family(
        name="minimax_m2",
        models="MiniMax M2",
        architectures=("MiniMaxM2ForCausalLM",),
        gguf_architectures=("minimax-m2",),
        traits=traits.minimax_m2,
        reads=_EXPERTS | {"partial_rotary_factor", "attn_type_list"},
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5_000_000.0,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "eos_token_id": 200020,
            "bos_token_id": 200034,
        },
        implies={"use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True} | _SIGMOID,
        stored=Stored(
            names=MIXTRAL_NAMES | {"mlp.router_correction": "block_sparse_moe.e_score_correction_bias"},
            has_extra_layers=True,
        ),
        gguf_keys=EXPERT_COUNTS | {"expert_feed_forward_length": "intermediate_size"},
        gguf_further={"expert_gating_func": "expert_gating_func"},
    ),
)
