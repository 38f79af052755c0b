"""Rows of Gemma 1 to 3n."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist

from headrace.errors import UnsupportedModelError
from headrace.models import traits
from headrace.models.family import Config, Family
from headrace.models.spec import Shape
from headrace.models.stored_tensors import TEXT_MODEL

_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_GEMMA2_KEYS = frozenset(
    {"attention_bias", "query_pre_attn_scalar", "final_logit_softcapping", "sliding_window", "layer_types"}
)
_GEMMA2_GGUF_KEYS = {
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "final_logit_softcapping": "final_logit_softcapping",
}
_SHARED_KEYS = r".*\.self_attn\.(k_proj|v_proj|k_norm)\.weight"  # of layers that share those of others: not used


def _equal_widths(config: Config) -> Config:
    """Reads the width of the MLPs, which Gemma 3n states for each layer."""
    widths = config.get("intermediate_size")
    if not isinstance(widths, list):
        return config
    if len(set(widths)) != 1:
        raise UnsupportedModelError(f"intermediate_size differs between layers ({widths}), which is not supported")
    return {**config, "intermediate_size": widths[0]}


def _shares_of_gates(values: Config) -> Config:
    """GGUF files have the limits in standard deviations, minus infinity for none."""
    limits = values.get("activation_sparsity_scale") or []
    return {"activation_sparsity_pattern": [NormalDist().cdf(limit) for limit in limits]}


def _gemma3n_sizes(shapes: Mapping[str, Shape]) -> Config:
    sizes = {
        "vocab_size_per_layer_input": "per_layer_token_embd.weight",
        "laurel_rank": "blk.0.laurel_l.weight",
    }
    return {key: shapes[name][0] for key, name in sizes.items() if name in shapes}


GEMMA = (
    Family(
        name="gemma",
        models="Gemma 1, CodeGemma",
        architectures=("GemmaForCausalLM",),
        gguf_architectures=("gemma",),
        traits=traits.gemma,
        reads=frozenset({"attention_bias"}),
        defaults=_GEMMA_DEFAULTS | {"num_key_value_heads": 16},
        activations=("gelu_pytorch_tanh", "gelu"),  # the first releases say gelu and mean gelu_tanh
    ),
    Family(
        name="gemma2",
        models="Gemma 2",
        architectures=("Gemma2ForCausalLM",),
        gguf_architectures=("gemma2",),
        traits=traits.gemma2,
        reads=_GEMMA2_KEYS | {"attn_logit_softcapping", "sliding_window_pattern"},
        defaults=_GEMMA_DEFAULTS
        | {
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
        },
        activations=("gelu_pytorch_tanh",),
        gguf_keys=_GEMMA2_GGUF_KEYS | {"attn_logit_softcapping": "attn_logit_softcapping"},
    ),
    Family(
        name="gemma3_text",  # gemma3 is the multimodal model
        models="Gemma 3 (the text models)",
        architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        gguf_architectures=("gemma3",),
        traits=traits.gemma3,
        reads=_GEMMA2_KEYS | {"sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"},
        defaults=_GEMMA_DEFAULTS
        | {
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
            "sliding_window": None,  # configs state it
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        activations=("gelu_pytorch_tanh",),
        has_local_rope=True,
        states_stretched_len=True,
        stored=TEXT_MODEL,
        gguf_keys=_GEMMA2_GGUF_KEYS | {"rope.freq_base_swa": "rope_local_base_freq"},
    ),
    Family(
        name="gemma3n_text",  # gemma3n is the multimodal model
        models="Gemma 3n E2B and E4B (the text models)",
        architectures=("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
        gguf_architectures=("gemma3n",),
        traits=traits.gemma3n,
        reads=_GEMMA2_KEYS
        | {
            "altup_correct_scale",
            "altup_coef_clip",  # of training
            "altup_lr_multiplier",
            "rope_local_base_freq",
            "sliding_window_pattern",
        },
        defaults=_GEMMA_DEFAULTS
        | {
            "vocab_size": 262400,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "final_logit_softcapping": 30.0,
            "sliding_window": 512,
            "sliding_window_pattern": 5,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "vocab_size_per_layer_input": 262144,
            "hidden_size_per_layer_input": 256,
            "altup_active_idx": 0,
            "altup_correct_scale": True,
            "altup_num_inputs": 4,
            "num_kv_shared_layers": 15,
            "laurel_rank": 64,
        },
        derived=_equal_widths,
        activations=("gelu_pytorch_tanh",),
        has_local_rope=True,
        stored=replace(
            TEXT_MODEL,
            leftovers=rf"{_SHARED_KEYS}|(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\..*",
        ),
        gguf_keys=_GEMMA2_GGUF_KEYS
        | {
            "altup.active_idx": "altup_active_idx",
            "altup.num_inputs": "altup_num_inputs",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        gguf_reads=frozenset({"activation_sparsity_scale"}),
        gguf_computes=_shares_of_gates,
        gguf_tells=_gemma3n_sizes,
    ),
)
