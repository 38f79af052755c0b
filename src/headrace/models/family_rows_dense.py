"""Rows of dense families with layouts of their own: other norms, activations, positions or fused tensors."""

from __future__ import annotations

from collections.abc import Collection

from headrace.errors import UnsupportedModelError
from headrace.models import dense_traits as traits
from headrace.models.family import Config, Family
from headrace.models.stored_tensors import Stored

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GELUS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
_GPT_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
}
_OLD_MASKS = r".*\.attn\.(bias|masked_bias)"
_GPT_NAMES = {
    "model.embed_tokens": "wte",
    "model.embed_positions": "wpe",
    "model.norm": "ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}


def _falcon_kv_heads(config: Config) -> Config:
    """Without `num_kv_heads` of the newer models there is one key-value head, or one per query head."""
    if config.get("new_decoder_architecture"):
        num_kv_heads = config.get("num_kv_heads") or config.get("num_attention_heads")
    else:
        num_kv_heads = 1 if config.get("multi_query") else config.get("num_attention_heads")
    return {**config, "num_key_value_heads": num_kv_heads}


def _falcon_norms(tensors: Collection[str]) -> Config:
    return {"num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in tensors else 1}


def _bigcode_kv_heads(config: Config) -> Config:
    return {**config, "num_key_value_heads": 1 if config["multi_query"] else config["num_attention_heads"]}


def _mpt_width(config: Config) -> Config:
    """GGUF files state the width, and two settings of attention that config.json has in `attn_config`."""
    width = config.get("intermediate_size") or config.get("expansion_ratio", 4) * config.get("hidden_size", 0)
    of_gguf = {key: config[key] for key in ("alibi_bias_max", "clip_qkv") if key in config}
    others = {key: value for key, value in config.items() if key not in of_gguf}
    return {**others, "intermediate_size": width, "attn_config": of_gguf | (config["attn_config"] or {})}


def _internlm_theta(config: Config) -> Config:
    """Reads its own object of the rope. A dynamic one is plain within the stated context, which is all that is used."""
    rotary = config.get("rotary") or {}
    if rotary.get("type", "origin") not in ("origin", "dynamic"):
        raise UnsupportedModelError(f"rotary type {rotary['type']!r} is not supported for internlm")
    return {**config, "rope_theta": rotary.get("base", config.get("rope_theta"))}


DENSE = (
    Family(
        name="nemotron",
        models="Nemotron 3 and 4, Minitron",
        architectures=("NemotronForCausalLM",),
        gguf_architectures=("nemotron",),
        traits=traits.nemotron,
        reads=frozenset({"attention_bias", "mlp_bias", "partial_rotary_factor"}),
        renamed={"norm_eps": "rms_norm_eps"},
        defaults={
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 3,
            "bos_token_id": 2,
        },
        activations=("relu2",),
    ),
    Family(
        name="arcee",
        models="Arcee AFM 4.5B",
        architectures=("ArceeForCausalLM",),
        gguf_architectures=("arcee",),
        traits=traits.arcee,
        reads=frozenset({"attention_bias", "mlp_bias"}),
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 128001},
        activations=("relu2",),
        gguf_rotates_pairs=True,
    ),
    Family(
        name="falcon",
        models="Falcon 7B, 11B, 40B and 180B, Falcon-RW",
        architectures=("FalconForCausalLM",),
        gguf_architectures=("falcon",),
        traits=traits.falcon,
        reads=frozenset({"bias", "parallel_attn", "num_ln_in_parallel_attn", "alibi"}),
        renamed={
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_head_kv": "num_kv_heads",
            "n_embed": "hidden_size",
            "ffn_hidden_size": "intermediate_size",
            "activation": "hidden_act",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        defaults={
            "max_position_embeddings": 2048,
            "parallel_attn": True,
            "multi_query": True,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "eos_token_id": 11,
            "bos_token_id": 11,
        },
        derived=_falcon_kv_heads,
        activations=("gelu",),
        widens_by=4,
        stored=Stored(
            root="transformer.",
            layers="h",
            names={
                "model.embed_tokens": "word_embeddings",
                "model.norm": "ln_f",
                "self_attn.o_proj": "self_attention.dense",
                "mlp.up_proj": "mlp.dense_h_to_4h",
                "mlp.down_proj": "mlp.dense_4h_to_h",
            },
            other_names={"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"},
            fused={"self_attention.query_key_value": QKV},
            by_head=True,
        ),
        gguf_keys={"attention.head_count_kv": "num_kv_heads"},
        gguf_implies={"new_decoder_architecture": True},  # only these state their number of key-value heads
        gguf_tells=_falcon_norms,
    ),
    Family(
        name="baichuan",
        models="Baichuan and Baichuan 2, 7B and 13B",
        architectures=("BaichuanForCausalLM", "BaiChuanForCausalLM"),
        gguf_architectures=("baichuan",),
        traits=traits.baichuan,
        renamed={"model_max_length": "max_position_embeddings"},
        defaults={"max_position_embeddings": 4096, "eos_token_id": 2, "bos_token_id": 1},
        stored=Stored(fused={"self_attn.W_pack": QKV}),
        gguf_rotates_pairs=True,
    ),
    Family(
        name="bloom",
        models="BLOOM, BLOOMZ",
        architectures=("BloomForCausalLM",),
        gguf_architectures=("bloom",),
        traits=traits.bloom,
        reads=frozenset(
            {
                "apply_residual_connection_post_layernorm",
                "attention_softmax_in_fp32",  # always the case here
                "bias_dropout_fusion",  # how Megatron trained it
                "offset_alibi",
                "skip_bias_add",
            }
        ),
        renamed={
            "n_embed": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_inner": "intermediate_size",
            "seq_length": "max_position_embeddings",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
        has_rope=False,
        widens_by=4,
        stored=Stored(
            root="transformer.",
            layers="h",
            names={
                "model.embed_tokens": "word_embeddings",
                "model.embed_norm": "word_embeddings_layernorm",
                "model.norm": "ln_f",
                "self_attn.o_proj": "self_attention.dense",
                "mlp.up_proj": "mlp.dense_h_to_4h",
                "mlp.down_proj": "mlp.dense_4h_to_h",
            },
            fused={"self_attention.query_key_value": QKV},
            by_head=True,
        ),
    ),
    Family(
        name="mpt",
        models="MPT 7B and 30B",
        architectures=("MPTForCausalLM", "MptForCausalLM"),
        gguf_architectures=("mpt",),
        traits=traits.mpt,
        reads=frozenset({"attn_config", "no_bias", "norm_type"}),  # all its kinds of norm are LayerNorm
        renamed={
            "d_model": "hidden_size",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
            "max_seq_len": "max_position_embeddings",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "attn_config": {},
            "no_bias": True,
            "tie_word_embeddings": True,
        },
        derived=_mpt_width,
        has_rope=False,
        stored=Stored(
            root="transformer.",
            layers="blocks",
            names={
                "model.embed_tokens": "wte",
                "model.norm": "norm_f",
                "input_layernorm": "norm_1",
                "post_attention_layernorm": "norm_2",
                "self_attn.o_proj": "attn.out_proj",
                "mlp.up_proj": "ffn.up_proj",
                "mlp.down_proj": "ffn.down_proj",
            },
            fused={"attn.Wqkv": QKV},
        ),
        gguf_keys={"attention.max_alibi_bias": "alibi_bias_max", "attention.clamp_kqv": "clip_qkv"},
    ),
    Family(
        name="olmo",
        models="OLMo 1",
        architectures=("OlmoForCausalLM",),
        gguf_architectures=("olmo",),
        traits=traits.olmo,
        reads=frozenset({"attention_bias", "clip_qkv"}),
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
        gguf_keys={"attention.clamp_kqv": "clip_qkv"},
        gguf_rotates_pairs=True,
    ),
    Family(
        name="opt",
        models="OPT (all but 350M)",
        architectures=("OPTForCausalLM",),
        gguf_architectures=(),
        traits=traits.opt,
        reads=frozenset({"do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"}),
        renamed={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "do_layer_norm_before": True,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
            "bos_token_id": 2,
        },
        activations=("relu",),
        has_rope=False,
        stored=Stored(
            root="model.decoder.",
            names={
                "model.norm": "final_layer_norm",
                "input_layernorm": "self_attn_layer_norm",
                "post_attention_layernorm": "final_layer_norm",
                "self_attn.o_proj": "self_attn.out_proj",
                "mlp.up_proj": "fc1",
                "mlp.down_proj": "fc2",
            },
        ),
    ),
    Family(
        name="gpt_neox",
        models="GPT-NeoX 20B, Pythia, Dolly 2",
        architectures=("GPTNeoXForCausalLM",),
        gguf_architectures=("gptneox",),
        traits=traits.gpt_neox,
        reads=frozenset({"partial_rotary_factor", "attention_bias", "attention_probs_dropout_prob"}),
        renamed={
            "rotary_pct": "partial_rotary_factor",
            "rotary_emb_base": "rope_theta",
            "layer_norm_eps": "rms_norm_eps",
        },
        defaults={
            "max_position_embeddings": 2048,
            "partial_rotary_factor": 0.25,
            "attention_bias": True,
            "use_parallel_residual": True,
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
            "bos_token_id": 0,
        },
        activations=_GELUS,
        stored=Stored(
            root="gpt_neox.",
            names={
                "model.embed_tokens": "embed_in",
                "model.norm": "final_layer_norm",
                "lm_head": "embed_out",
                "self_attn.o_proj": "attention.dense",
                "mlp.up_proj": "mlp.dense_h_to_4h",
                "mlp.down_proj": "mlp.dense_4h_to_h",
            },
            fused={"attention.query_key_value": QKV},
            by_head=True,
            leftovers=r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
        ),
        gguf_keys={"use_parallel_residual": "use_parallel_residual"},
    ),
    Family(
        name="phi",
        models="Phi-1, 1.5 and 2",
        architectures=("PhiForCausalLM",),
        gguf_architectures=("phi2",),
        traits=traits.phi,
        reads=frozenset({"partial_rotary_factor"}),
        renamed={"layer_norm_eps": "rms_norm_eps"},
        defaults={
            "max_position_embeddings": 2048,
            "partial_rotary_factor": 0.5,
            "hidden_act": "gelu_new",
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
        activations=_GELUS,
        stored=Stored(
            names={
                "model.norm": "model.final_layernorm",
                "self_attn.o_proj": "self_attn.dense",
                "mlp.up_proj": "mlp.fc1",
                "mlp.down_proj": "mlp.fc2",
            }
        ),
    ),
    Family(
        name="gpt2",
        models="GPT-2",
        architectures=("GPT2LMHeadModel",),
        gguf_architectures=("gpt2",),
        traits=traits.gpt2,
        reads=frozenset({"scale_attn_weights", "reorder_and_upcast_attn"}),  # attention is in float32 here anyway
        renamed=_GPT_KEYS,
        defaults={
            "max_position_embeddings": 1024,
            "hidden_act": "gelu_new",
            "rms_norm_eps": 1e-5,
            "scale_attn_weights": True,
            "tie_word_embeddings": True,
            "eos_token_id": 50256,
            "bos_token_id": 50256,
        },
        activations=_GELUS,
        has_rope=False,
        widens_by=4,
        stored=Stored(
            root="transformer.",
            layers="h",
            names=_GPT_NAMES,
            fused={"attn.c_attn": QKV},
            has_transposed_layers=True,
            leftovers=r".*h\.\d+\.attn\.(bias|masked_bias)",
        ),
    ),
    Family(
        name="gptj",
        models="GPT-J 6B",
        architectures=("GPTJForCausalLM",),
        gguf_architectures=(),
        traits=traits.gptj,
        reads=frozenset({"partial_rotary_factor", "scale_attn_weights"}),  # scores are always scaled
        renamed=_GPT_KEYS,
        defaults={
            "max_position_embeddings": 2048,
            "hidden_act": "gelu_new",
            "rms_norm_eps": 1e-5,
            "rotary_dim": 64,
            "eos_token_id": 50256,
            "bos_token_id": 50256,
        },
        implies={"rotary": True},
        activations=_GELUS,
        widens_by=4,
        stored=Stored(
            root="transformer.",
            layers="h",
            names={
                "model.embed_tokens": "wte",
                "model.norm": "ln_f",
                "input_layernorm": "ln_1",
                "self_attn.q_proj": "attn.q_proj",
                "self_attn.k_proj": "attn.k_proj",
                "self_attn.v_proj": "attn.v_proj",
                "self_attn.o_proj": "attn.out_proj",
                "mlp.up_proj": "mlp.fc_in",
                "mlp.down_proj": "mlp.fc_out",
            },
            leftovers=_OLD_MASKS,
        ),
    ),
    Family(
        name="gpt_bigcode",
        models="StarCoder, SantaCoder",
        architectures=("GPTBigCodeForCausalLM",),
        gguf_architectures=("starcoder",),
        traits=traits.gpt2,
        reads=frozenset(
            {"scale_attn_weights", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "multi_query"}
        ),
        renamed=_GPT_KEYS,
        defaults={
            "max_position_embeddings": 1024,
            "hidden_act": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-5,
            "scale_attn_weights": True,
            "multi_query": True,
            "tie_word_embeddings": True,
            "eos_token_id": 50256,
            "bos_token_id": 50256,
        },
        derived=_bigcode_kv_heads,
        activations=_GELUS,
        has_rope=False,
        widens_by=4,
        stored=Stored(
            root="transformer.",
            layers="h",
            names=_GPT_NAMES,
            fused={"attn.c_attn": QKV},
            by_head=True,
            leftovers=_OLD_MASKS,
        ),
    ),
    Family(
        name="internlm",
        models="InternLM 7B and 20B",
        architectures=("InternLMForCausalLM",),
        gguf_architectures=(),
        traits=traits.internlm1,
        reads=frozenset({"bias", "rotary"}),
        defaults={"max_position_embeddings": 2048, "bias": True, "eos_token_id": 2, "bos_token_id": 1},
        derived=_internlm_theta,
        stored=Stored(leftovers=r".*\.rotary_emb\.inv_freq"),
    ),
    Family(
        name="internlm2",
        models="InternLM 2 and 2.5",
        architectures=("InternLM2ForCausalLM",),
        gguf_architectures=("internlm2",),
        traits=traits.internlm,
        reads=frozenset({"bias"}),
        defaults={"max_position_embeddings": 2048, "eos_token_id": 2, "bos_token_id": 1},
        stored=Stored(
            names={
                "model.embed_tokens": "tok_embeddings",
                "lm_head": "output",
                "input_layernorm": "attention_norm",
                "post_attention_layernorm": "ffn_norm",
                "self_attn.o_proj": "attention.wo",
                "mlp.gate_proj": "feed_forward.w1",
                "mlp.up_proj": "feed_forward.w3",
                "mlp.down_proj": "feed_forward.w2",
            },
            fused={"attention.wqkv": QKV},
            by_head=True,
        ),
        gguf_rotates_pairs=True,
    ),
    Family(
        name="internlm3",
        models="InternLM 3",
        architectures=("InternLM3ForCausalLM",),
        gguf_architectures=(),
        traits=traits.internlm,
        reads=frozenset({"bias", "qkv_bias"}),
        defaults={"max_position_embeddings": 32768, "eos_token_id": 2, "bos_token_id": 1},
    ),
)
