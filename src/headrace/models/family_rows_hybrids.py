"""Rows of families whose layers have a recurrent state, beside attention or instead of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.errors import ModelError
from headrace.models import hybrid_gguf as gguf
from headrace.models import hybrid_traits as traits
from headrace.models.family import Config, Family
from headrace.models.recurrent_specs import GatedDeltaSpec
from headrace.models.spec import ModelSpec
from headrace.models.stored_tensors import IMAGES, Stored

_MTP = r"mtp\..*"  # heads that predict further tokens
_IMAGES = r"(model\.)?visual\..*"
_MAMBA_PARTS = ("gate_proj", "x_proj", "b_proj", "c_proj", "dt_proj")


def _named(prefix: str, *stems: str) -> dict[str, str]:
    """Our names of a mixer's tensors -> theirs."""
    return {f"recurrent.{stem}": f"{prefix}.{stem}" for stem in stems}


def _mamba_stored(prefix: str) -> dict[str, str]:
    return _named(prefix, "conv1d", "A_log", "D", "dt_bias", "norm", "out_proj")


def _mamba_fused(prefix: str) -> dict[str, tuple[str, ...]]:
    return {f"{prefix}.in_proj": tuple(f"recurrent.{part}" for part in _MAMBA_PARTS)}


# ---- LFM2


def _lfm2_layers(config: Config) -> Config:
    """Adds the kinds of layers and the width of the MLP, which older configs state in other words."""
    num_layers, attention = config.get("num_hidden_layers") or 0, config.get("full_attn_idxs")
    chosen = range(num_layers) if attention is None else attention
    kinds = ["full_attention" if index in chosen else "conv" for index in range(num_layers)]
    return {
        **config,
        "layer_types": config.get("layer_types") or kinds,
        "intermediate_size": _lfm2_width(config),
        "tie_word_embeddings": config.get("tie_embedding", config["tie_word_embeddings"]),
    }


def _lfm2_width(config: Config) -> Any:
    width = config.get("block_ff_dim") or config.get("intermediate_size")
    if not config["block_auto_adjust_ff_dim"] or not isinstance(width, int):
        return width
    width = int(2 * width / 3)
    if config["block_ffn_dim_multiplier"] is None:
        return width
    multiple = config["block_multiple_of"]
    return -(-int(config["block_ffn_dim_multiplier"] * width) // multiple) * multiple


_LFM2_KEYS = frozenset(
    {
        "conv_bias",
        "layer_types",
        "full_attn_idxs",
        "block_ffn_dim_multiplier",
        "block_norm_eps",  # repeats norm_eps
        "block_mlp_init_scale",  # of training
        "block_out_init_scale",
    }
)
_LFM2_NAMES = {
    "model.norm": "model.embedding_norm",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "recurrent.conv1d": "conv.conv",
    **_named("conv", "in_proj", "out_proj"),
}


# ---- Mamba 2 and what is made of it


_MAMBA2_KEYS = frozenset(
    {
        "use_bias",
        "use_conv_bias",
        "rescale_prenorm_residual",  # of training
        "time_step_scale",  # of training
        "norm_before_gate",  # true for Codestral Mamba, but no implementation reads it: the gate always comes first
    }
)


def _attention_free(config: Config) -> Config:
    """Adds sizes that models with attention state: no layer has attention or an MLP."""
    inner = (config.get("mamba_num_heads") or 0) * (config.get("mamba_head_dim") or 0)
    sizes = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": config.get("mamba_head_dim")}
    return {**config, **sizes, "intermediate_size": inner}


def _falcon_h1_heads(config: Config) -> Config:
    """Adds what older configs leave out or call "auto"."""
    inner = config["mamba_d_ssm"] or config["mamba_expand"] * config["hidden_size"]
    added = {"head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]}
    if config["mamba_d_head"] in ("auto", None):
        added["mamba_d_head"] = inner // config["mamba_n_heads"]
    elif config["mamba_d_head"] * config["mamba_n_heads"] != inner:
        raise ModelError(f"{config['mamba_n_heads']} heads of {config['mamba_d_head']} are not mamba_d_ssm={inner}")
    return {**config, **added}


_NEMOTRON_BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NEMOTRON_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}  # as transformers 5 writes them


def _nemotron_layers(config: Config) -> Config:
    """Adds the kinds of layers, which older configs state as a pattern of letters."""
    names: Sequence[str] | None = config.get("layers_block_type") or config.get("layer_types")
    if names is None:
        names = [_NEMOTRON_BLOCKS.get(letter, letter) for letter in config.get("hybrid_override_pattern") or ""]
    names = [_NEMOTRON_NAMES.get(name, name) for name in names]
    return {**config, "layers_block_type": names, "num_hidden_layers": len(names)}


_FALCON_H1_MULTIPLIERS = {
    "embedding_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
    "key_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
    "ssm_multipliers": [1.0] * 5,
    "mlp_multipliers": [1.0, 1.0],
}
_FALCON_H1_NAMES = {
    "model.norm": "model.final_layernorm",
    "post_attention_layernorm": "pre_ff_layernorm",
    **{f"mlp.{part}_proj": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    **_mamba_stored("mamba"),
}
_BACKBONE_NAMES = {"model.embed_tokens": "model.embeddings", "model.norm": "model.norm_f", "input_layernorm": "norm"}
_NEMOTRON_H_NAMES = {
    **_BACKBONE_NAMES,
    **_mamba_stored("mixer"),
    **{f"self_attn.{part}_proj": f"mixer.{part}_proj" for part in "qkvo"},
    **{f"mlp.{part}_proj": f"mixer.{part}_proj" for part in ("up", "down")},
    **{f"mlp.experts.*.{part}_proj": f"mixer.experts.*.{part}_proj" for part in ("up", "down")},
    **{f"mlp.shared_expert.{part}_proj": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
    "mlp.router": "mixer.gate",
    "mlp.router_correction": "mixer.gate.e_score_correction_bias",
}

# ---- gated delta nets


def _delta_layers(config: Config) -> Config:
    """Adds the kinds of layers: every n-th has attention, unless they are named."""
    period = config.get("full_attention_interval") or 4
    num_layers = config.get("num_hidden_layers") or 0
    kinds = ["linear_attention" if (index + 1) % period else "full_attention" for index in range(num_layers)]
    return {**config, "layer_types": config.get("layer_types") or kinds}


def _delta_mixture_layers(config: Config) -> Config:
    """All layers have experts, so no config states the width of an MLP."""
    return {**_delta_layers(config), "intermediate_size": config.get("moe_intermediate_size")}


def _num_key_heads(spec: ModelSpec) -> int:
    assert isinstance(spec.recurrent, GatedDeltaSpec)
    return spec.recurrent.num_key_heads


def _num_heads(spec: ModelSpec) -> int:
    return spec.num_heads


_DELTA_KEYS = frozenset(
    {
        "attention_bias",
        "layer_types",
        "full_attention_interval",
        "partial_rotary_factor",
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "shared_expert_intermediate_size",
    }
)
_DELTA_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_DELTA_EXPERTS = {"decoder_sparse_step": 1, "norm_topk_prob": True, "num_experts_per_tok": 10}
_DELTA_IMPLIED = {"attn_output_gate": True}
_DELTA_NAMES = {
    "mlp.router": "mlp.gate",
    **_named("linear_attn", "conv1d", "A_log", "dt_bias", "norm", "out_proj"),
}
_GATED_ATTENTION: dict[str, tuple[str, ...]] = {
    "self_attn.q_proj": ("self_attn.q_proj", "self_attn.output_gate_proj"),
}
_QKV: tuple[str, ...] = tuple(f"recurrent.{part}_proj" for part in "qkv")
_QWEN3_5_STORED = Stored(
    prefix="language_model.",
    names=_DELTA_NAMES | {f"recurrent.{part}_proj": f"linear_attn.in_proj_{part}" for part in "zba"},
    other_names={"mlp.experts.*.down_proj": "mlp.experts.down_proj"},
    other_fused={"mlp.experts.gate_up_proj": ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj")},
    fused={"linear_attn.in_proj_qkv": _QKV, **_GATED_ATTENTION},
    num_groups={"self_attn.q_proj": _num_heads},
    has_upright_stacks=True,
    leftovers=f"{_IMAGES}|{_MTP}",
)

HYBRIDS = (
    Family(
        name="lfm2",
        models="LFM2 350M to 2.6B, LFM2-VL (the text models)",
        architectures=("Lfm2ForCausalLM", "Lfm2VlForConditionalGeneration"),
        gguf_architectures=("lfm2",),
        traits=traits.lfm2,
        reads=_LFM2_KEYS,
        renamed={"norm_eps": "rms_norm_eps"},
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 128_000,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
        derived=_lfm2_layers,
        stored=Stored(prefix="language_model.", names=_LFM2_NAMES, leftovers=IMAGES),
        gguf_further={"shortconv.l_cache": "conv_L_cache"},
        gguf_implies={"block_auto_adjust_ff_dim": False},
        gguf_tells=gguf.lfm2_layers,
    ),
    Family(
        name="mamba2",
        models="Mamba 2, Codestral Mamba",
        architectures=("Mamba2ForCausalLM",),
        gguf_architectures=("mamba2",),
        traits=traits.mamba2,
        reads=_MAMBA2_KEYS,
        implies={"rms_norm": True},
        renamed={
            "num_heads": "mamba_num_heads",
            "head_dim": "mamba_head_dim",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        defaults={
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "state_size": 128,
            "conv_kernel": 4,
            "n_groups": 8,
            "use_bias": False,
            "use_conv_bias": True,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 32768,  # configs state none, and a state has no limit
            "eos_token_id": 2,
            "bos_token_id": 0,
        },
        derived=_attention_free,
        has_rope=False,
        stored=Stored(
            root="backbone.",
            names=_BACKBONE_NAMES | _mamba_stored("mixer"),
            other_names={"model.embed_tokens": "model.embedding"},
            fused=_mamba_fused("mixer"),
        ),
        gguf_computes=gguf.mamba_sizes,
        gguf_tells=gguf.mamba_biases,
    ),
    Family(
        name="falcon_h1",
        models="Falcon-H1 0.5B to 34B",
        architectures=("FalconH1ForCausalLM",),
        gguf_architectures=("falcon-h1",),
        traits=traits.falcon_h1,
        reads=frozenset({"mamba_conv_bias", "mamba_norm_before_gate", "mamba_rms_norm", *_FALCON_H1_MULTIPLIERS}),
        defaults=_FALCON_H1_MULTIPLIERS
        | {
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "mamba_d_ssm": 1024,
            "mamba_n_heads": 128,
            "mamba_d_head": "auto",
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_norm_before_gate": True,
            "mamba_rms_norm": False,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
        derived=_falcon_h1_heads,
        stored=Stored(names=_FALCON_H1_NAMES, fused=_mamba_fused("mamba")),
        gguf_implies={"mamba_norm_before_gate": False},  # llama.cpp knows only this order
        gguf_computes=gguf.falcon_h1_sizes,
        gguf_tells=gguf.falcon_h1_parts,
    ),
    Family(
        name="nemotron_h",
        models="Nemotron-H, Nemotron Nano 2 and 3",
        architectures=("NemotronHForCausalLM",),
        gguf_architectures=("nemotron_h", "nemotron_h_moe"),
        traits=traits.nemotron_h,
        reads=frozenset(
            {
                "attention_bias",
                "mlp_bias",
                "use_bias",
                "use_conv_bias",
                "num_local_experts",
                "num_experts_per_tok",
                "moe_intermediate_size",
                "moe_shared_expert_intermediate_size",
                "moe_shared_expert_overlap",  # of the computation in time
                "n_shared_experts",
                "norm_topk_prob",
                "routed_scaling_factor",
                "norm_eps",  # repeats layer_norm_epsilon
                "layer_types",
                "rescale_prenorm_residual",  # of training
            }
        ),
        renamed={
            "attention_head_dim": "head_dim",
            "layer_norm_epsilon": "rms_norm_eps",
            "n_routed_experts": "num_local_experts",
        },
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_bias": False,
            "use_bias": False,
            "use_conv_bias": True,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
        derived=_nemotron_layers,
        has_rope=False,
        stored=Stored(root="backbone.", names=_NEMOTRON_H_NAMES, fused=_mamba_fused("mixer"), leftovers=_MTP),
        gguf_further={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "expert_shared_count": "n_shared_experts",
            "expert_weights_norm": "norm_topk_prob",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
        },
        gguf_computes=gguf.nemotron_sizes,
        gguf_tells=gguf.nemotron_layers,
    ),
    Family(
        name="qwen3_next",
        models="Qwen3-Next 80B-A3B, Qwen3-Coder-Next",
        architectures=("Qwen3NextForCausalLM",),
        gguf_architectures=("qwen3next",),
        traits=traits.qwen3_next,
        reads=_DELTA_KEYS,
        renamed={"num_experts": "num_local_experts"},
        defaults=_DELTA_DEFAULTS | _DELTA_EXPERTS | {"num_local_experts": 512},
        derived=_delta_layers,
        implies=_DELTA_IMPLIED,
        stored=Stored(
            names=_DELTA_NAMES,
            fused={
                "linear_attn.in_proj_qkvz": (*_QKV, "recurrent.z_proj"),
                "linear_attn.in_proj_ba": ("recurrent.b_proj", "recurrent.a_proj"),
                **_GATED_ATTENTION,
            },
            num_groups={
                "linear_attn.in_proj_qkvz": _num_key_heads,
                "linear_attn.in_proj_ba": _num_key_heads,
                "self_attn.q_proj": _num_heads,
            },
            leftovers=_MTP,
        ),
        gguf_keys=gguf.DELTA_KEYS,
        gguf_further=gguf.DELTA_FURTHER,
        gguf_computes=gguf.delta_sizes,
    ),
    Family(
        name="qwen3_5_text",  # qwen3_5 is the multimodal model
        models="Qwen3.5 (the text models of the dense ones)",
        architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
        gguf_architectures=("qwen35",),
        traits=traits.qwen3_5,
        reads=_DELTA_KEYS,
        defaults=_DELTA_DEFAULTS | {"num_key_value_heads": 4},
        derived=_delta_layers,
        implies=_DELTA_IMPLIED,
        has_mrope=True,
        stored=_QWEN3_5_STORED,
        gguf_further=gguf.DELTA_FURTHER,
        gguf_reads=gguf.MROPE_KEYS,
        gguf_computes=gguf.delta_sizes,
    ),
    Family(
        name="qwen3_5_moe_text",
        models="Qwen3.5 35B-A3B to 397B-A17B (the text models)",
        architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        gguf_architectures=("qwen35moe",),
        traits=traits.qwen3_next,
        reads=_DELTA_KEYS,
        renamed={"num_experts": "num_local_experts"},
        defaults=_DELTA_DEFAULTS | _DELTA_EXPERTS | {"num_local_experts": 256, "num_experts_per_tok": 8},
        derived=_delta_mixture_layers,
        implies=_DELTA_IMPLIED,
        has_mrope=True,
        stored=_QWEN3_5_STORED,
        gguf_keys=gguf.DELTA_KEYS,
        gguf_further=gguf.DELTA_FURTHER,
        gguf_reads=gguf.MROPE_KEYS,
        gguf_computes=gguf.delta_sizes,
    ),
)
