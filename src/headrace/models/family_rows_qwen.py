"""Rows of Qwen 2 and 3, and of the text models of their multimodal versions."""

from __future__ import annotations

from dataclasses import replace

from headrace.models import traits
from headrace.models.family import Family
from headrace.models.family_rows_mixtures import EXPERT_COUNTS
from headrace.models.stored_tensors import TEXT_MODEL, Stored

_QWEN_KEYS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
_MROPE_SECTION = frozenset({"mrope_section"})  # as GGUF files state it
_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN3_MOE_KEYS = _QWEN_KEYS | {
    "attention_bias",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
}
_QWEN3_MOE_DEFAULTS = _QWEN_DEFAULTS | {
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
}
_MOE_GGUF_KEYS = EXPERT_COUNTS | {"expert_feed_forward_length": "moe_intermediate_size"}
_MROPE_GGUF_KEYS = {"rope.dimension_sections": "mrope_section"}


QWEN = (
    Family(
        name="qwen2",
        models="Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen",
        architectures=("Qwen2ForCausalLM",),
        gguf_architectures=("qwen2",),
        traits=traits.qwen2,
        reads=_QWEN_KEYS,
        defaults=_QWEN_DEFAULTS,
    ),
    Family(
        name="qwen3",
        models="Qwen3 (the dense ones)",
        architectures=("Qwen3ForCausalLM",),
        gguf_architectures=("qwen3",),
        traits=traits.qwen3,
        reads=_QWEN_KEYS | {"attention_bias"},
        defaults=_QWEN_DEFAULTS | {"head_dim": 128},
    ),
    Family(
        name="qwen2_5_vl",
        models="Qwen2-VL and Qwen2.5-VL (the text models)",
        architectures=("Qwen2_5_VLForConditionalGeneration", "Qwen2VLForConditionalGeneration"),
        gguf_architectures=("qwen2vl",),
        traits=traits.qwen2,
        reads=_QWEN_KEYS | _MROPE_SECTION,
        defaults=_QWEN_DEFAULTS,
        has_mrope=True,
        stored=TEXT_MODEL,
        gguf_keys=_MROPE_GGUF_KEYS,
    ),
    Family(
        name="qwen3_vl",
        models="Qwen3-VL (the text models of the dense ones)",
        architectures=("Qwen3VLForConditionalGeneration",),
        gguf_architectures=("qwen3vl",),
        traits=traits.qwen3,
        reads=_QWEN_KEYS | _MROPE_SECTION | {"attention_bias"},
        defaults=_QWEN_DEFAULTS | {"head_dim": 128, "max_position_embeddings": 128000},
        has_mrope=True,
        stored=TEXT_MODEL,
        gguf_keys=_MROPE_GGUF_KEYS,
    ),
    Family(
        name="qwen3_vl_moe",
        models="Qwen3-VL 30B-A3B and 235B-A22B (the text models)",
        architectures=("Qwen3VLMoeForConditionalGeneration",),
        gguf_architectures=("qwen3vlmoe",),
        traits=traits.qwen3_moe,
        reads=_QWEN3_MOE_KEYS | _MROPE_SECTION,
        renamed={"num_experts": "num_local_experts"},
        defaults=_QWEN3_MOE_DEFAULTS | {"max_position_embeddings": 128000, "norm_topk_prob": True},
        has_mrope=True,
        stored=replace(
            TEXT_MODEL,
            names={"mlp.router": "mlp.gate", "mlp.experts.*.down_proj": "mlp.experts.down_proj"},
            fused={"mlp.experts.gate_up_proj": ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj")},
        ),
        gguf_keys=_MOE_GGUF_KEYS | _MROPE_GGUF_KEYS,
    ),
    Family(
        name="qwen3_moe",
        models="Qwen3 30B-A3B, 235B-A22B and Coder",
        architectures=("Qwen3MoeForCausalLM",),
        gguf_architectures=("qwen3moe",),
        traits=traits.qwen3_moe,
        reads=_QWEN3_MOE_KEYS,
        renamed={"num_experts": "num_local_experts"},
        defaults=_QWEN3_MOE_DEFAULTS,
        implies={"use_qk_norm": True},
        stored=Stored(names={"mlp.router": "mlp.gate"}),
        gguf_keys=_MOE_GGUF_KEYS,
        gguf_implies={"norm_topk_prob": True},
    ),
)
