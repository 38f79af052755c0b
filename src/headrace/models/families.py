"""The model families, one row each. A new family of this shape is a row; its parity test stands in tests/models."""

from __future__ import annotations

from headrace.errors import UnsupportedModelError, nearest
from headrace.models import traits
from headrace.models.family import Config, Family
from headrace.models.stored import Stored

_FUSED_QKV: dict[str, tuple[str, ...]] = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
}
_FUSED_GATE_UP: dict[str, tuple[str, ...]] = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
_QWEN_KEYS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
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

FAMILIES = (
    Family(
        name="llama",
        architectures=("LlamaForCausalLM",),
        gguf_architectures=("llama",),
        traits=traits.llama,
        reads=frozenset({"attention_bias", "mlp_bias"}),
        defaults={"max_position_embeddings": 2048},
        gguf_rotates_pairs=True,
    ),
    Family(
        name="mistral",
        architectures=("MistralForCausalLM",),
        gguf_architectures=(),  # stored as llama
        traits=traits.mistral,
        reads=frozenset({"sliding_window"}),
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    Family(
        name="ministral",
        architectures=("MinistralForCausalLM",),
        gguf_architectures=(),
        traits=traits.ministral,
        reads=frozenset({"sliding_window", "layer_types"}),
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    Family(
        name="phi3",
        architectures=("Phi3ForCausalLM",),
        gguf_architectures=(),
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
    ),
    Family(
        name="qwen2",
        architectures=("Qwen2ForCausalLM",),
        gguf_architectures=("qwen2",),
        traits=traits.qwen2,
        reads=_QWEN_KEYS,
        defaults=_QWEN_DEFAULTS,
    ),
    Family(
        name="qwen3",
        architectures=("Qwen3ForCausalLM",),
        gguf_architectures=("qwen3",),
        traits=traits.qwen3,
        reads=_QWEN_KEYS | {"attention_bias"},
        defaults=_QWEN_DEFAULTS | {"head_dim": 128},
    ),
    Family(
        name="gemma",
        architectures=("GemmaForCausalLM",),
        gguf_architectures=("gemma",),
        traits=traits.gemma,
        reads=frozenset({"attention_bias"}),
        defaults=_GEMMA_DEFAULTS | {"num_key_value_heads": 16},
        activations=("gelu_pytorch_tanh", "gelu"),  # the first releases say gelu and mean the other
    ),
    Family(
        name="gemma2",
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
        name="gemma3_text",  # gemma3 is the model with images
        architectures=("Gemma3ForCausalLM",),
        gguf_architectures=("gemma3",),
        traits=traits.gemma3,
        reads=_GEMMA2_KEYS | {"sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"},
        defaults=_GEMMA_DEFAULTS
        | {
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
        gguf_keys=_GEMMA2_GGUF_KEYS | {"rope.freq_base_swa": "rope_local_base_freq"},
    ),
)


def family_of_config(config: Config) -> Family:
    names = config.get("architectures") or []
    if not names:
        return _by_model_type(config.get("model_type"))
    known = {name: family for family in FAMILIES for name in family.architectures}
    for name in names:
        if name in known:
            return known[name]
    raise _unknown("architecture", names[0], list(known))


def _by_model_type(model_type: object) -> Family:
    known = {family.name: family for family in FAMILIES}
    if model_type not in known:
        raise _unknown("model_type", model_type, list(known))
    return known[str(model_type)]


def family_of_gguf(architecture: object) -> Family:
    known = {name: family for family in FAMILIES for name in family.gguf_architectures}
    if architecture not in known:
        raise _unknown("GGUF architecture", architecture, list(known))
    return known[str(architecture)]


def _unknown(what: str, name: object, known: list[str]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{what} {name!r} is not supported{nearest(str(name), known)} (supported: {', '.join(known)})"
    )
