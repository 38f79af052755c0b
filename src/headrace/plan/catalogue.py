"""The model shapes that are built in, so that no hub is needed: published config.json values, by name.

A row gives only what decides size and speed; the rest of a config is filled in by family, and the engine's own reader
(`models.hub_config`) turns it into a `ModelSpec`. Norms, biases and RoPE of the checkpoint do not matter here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace.errors import ModelError, nearest

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    hub_id: str  # as on the Hugging Face hub
    config: Config
    names: tuple[str, ...] = field(default=())  # further names, such as those of instruct versions


def _dense(
    architecture: str, layers: int, hidden: int, width: int, heads: int, kv_heads: int, vocab: int, context: int,
    **more: Any,
) -> Config:  # fmt: skip
    return {
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "torch_dtype": "bfloat16",
        **more,
    }


def _llama(
    layers: int, hidden: int, width: int, heads: int, kv_heads: int, vocab: int, context: int, **more: Any
) -> Config:
    return _dense("LlamaForCausalLM", layers, hidden, width, heads, kv_heads, vocab, context, **more)


def _qwen2(layers: int, hidden: int, width: int, heads: int, kv_heads: int, vocab: int = 152_064, context: int = 32_768,
           *, tied: bool = False) -> Config:  # fmt: skip
    return _dense("Qwen2ForCausalLM", layers, hidden, width, heads, kv_heads, vocab, context, tie_word_embeddings=tied)


def _qwen3(layers: int, hidden: int, width: int, heads: int, *, tied: bool = False) -> Config:
    return _dense(
        "Qwen3ForCausalLM", layers, hidden, width, heads, 8, 151_936, 40_960, head_dim=128, tie_word_embeddings=tied
    )


def _qwen3_moe(layers: int, hidden: int, width: int, heads: int, kv_heads: int, expert: int) -> Config:
    more: Config = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert}
    more |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return _dense("Qwen3MoeForCausalLM", layers, hidden, width, heads, kv_heads, 151_936, 40_960, **more)


def _mistral(layers: int, hidden: int, width: int, heads: int, vocab: int, context: int, **more: Any) -> Config:
    more = {"head_dim": 128, "sliding_window": None} | more
    return _dense("MistralForCausalLM", layers, hidden, width, heads, 8, vocab, context, **more)


def _mixtral(layers: int, hidden: int, width: int, heads: int, vocab: int, context: int) -> Config:
    more = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
    return _dense("MixtralForCausalLM", layers, hidden, width, heads, 8, vocab, context, **more)


def _gemma2(layers: int, hidden: int, width: int, heads: int, kv_heads: int, head_dim: int) -> Config:
    more: Config = {"head_dim": head_dim, "sliding_window": 4096, "query_pre_attn_scalar": head_dim}
    more |= {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
    return _dense("Gemma2ForCausalLM", layers, hidden, width, heads, kv_heads, 256_000, 8192, **more)


def _gemma3(layers: int, hidden: int, width: int, heads: int, kv_heads: int, head_dim: int, *, vocab: int = 262_208,
            context: int = 131_072, window: int = 1024) -> Config:  # fmt: skip
    more: Config = {
        "head_dim": head_dim,
        "sliding_window": window,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    }
    more |= {"query_pre_attn_scalar": head_dim, "hidden_activation": "gelu_pytorch_tanh"}
    return _dense("Gemma3ForCausalLM", layers, hidden, width, heads, kv_heads, vocab, context, **more)


def _phi3(
    layers: int, hidden: int, width: int, heads: int, kv_heads: int, vocab: int, context: int, **more: Any
) -> Config:
    return _dense("Phi3ForCausalLM", layers, hidden, width, heads, kv_heads, vocab, context, **more)


_DEEPSEEK_V3: Config = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129_280,
    "max_position_embeddings": 163_840,
    "quantization_config": {"quant_method": "fp8"},
}
_GPT_OSS_20B: Config = {
    "architectures": ["GptOssForCausalLM"],
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201_088,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
}
_LLAMA31_8B = _llama(32, 4096, 14_336, 32, 8, 128_256, 131_072)
_LLAMA31_70B = _llama(80, 8192, 28_672, 64, 8, 128_256, 131_072)

CATALOGUE: tuple[Entry, ...] = (
    Entry(
        "meta-llama/Llama-2-7b-hf", _llama(32, 4096, 11_008, 32, 32, 32_000, 4096), ("llama-2-7b", "Llama-2-7b-chat-hf")
    ),
    Entry(
        "meta-llama/Llama-2-13b-hf",
        _llama(40, 5120, 13_824, 40, 40, 32_000, 4096),
        ("llama-2-13b", "Llama-2-13b-chat-hf"),
    ),
    Entry(
        "meta-llama/Llama-2-70b-hf",
        _llama(80, 8192, 28_672, 64, 8, 32_000, 4096),
        ("llama-2-70b", "Llama-2-70b-chat-hf"),
    ),
    Entry("meta-llama/Meta-Llama-3-8B", _llama(32, 4096, 14_336, 32, 8, 128_256, 8192), ("llama-3-8b",)),
    Entry("meta-llama/Meta-Llama-3-70B", _llama(80, 8192, 28_672, 64, 8, 128_256, 8192), ("llama-3-70b",)),
    Entry("meta-llama/Llama-3.1-8B", _LLAMA31_8B, ("Meta-Llama-3.1-8B",)),
    Entry("meta-llama/Llama-3.1-70B", _LLAMA31_70B, ("Meta-Llama-3.1-70B",)),
    Entry("meta-llama/Llama-3.1-405B", _llama(126, 16_384, 53_248, 128, 8, 128_256, 131_072), ("Meta-Llama-3.1-405B",)),
    Entry(
        "meta-llama/Llama-3.2-1B",
        _llama(16, 2048, 8192, 32, 8, 128_256, 131_072, head_dim=64, tie_word_embeddings=True),
    ),
    Entry(
        "meta-llama/Llama-3.2-3B",
        _llama(28, 3072, 8192, 24, 8, 128_256, 131_072, head_dim=128, tie_word_embeddings=True),
    ),
    Entry("meta-llama/Llama-3.3-70B-Instruct", _LLAMA31_70B, ("llama-3.3-70b",)),
    Entry("Qwen/Qwen2.5-0.5B", _qwen2(24, 896, 4864, 14, 2, 151_936, tied=True)),
    Entry("Qwen/Qwen2.5-1.5B", _qwen2(28, 1536, 8960, 12, 2, 151_936, tied=True)),
    Entry("Qwen/Qwen2.5-3B", _qwen2(36, 2048, 11_008, 16, 2, 151_936, tied=True)),
    Entry("Qwen/Qwen2.5-7B", _qwen2(28, 3584, 18_944, 28, 4), ("Qwen2.5-Coder-7B",)),
    Entry("Qwen/Qwen2.5-14B", _qwen2(48, 5120, 13_824, 40, 8), ("Qwen2.5-Coder-14B",)),
    Entry("Qwen/Qwen2.5-32B", _qwen2(64, 5120, 27_648, 40, 8), ("Qwen2.5-Coder-32B", "QwQ-32B")),
    Entry("Qwen/Qwen2.5-72B", _qwen2(80, 8192, 29_568, 64, 8)),
    Entry("Qwen/Qwen3-0.6B", _qwen3(28, 1024, 3072, 16, tied=True)),
    Entry("Qwen/Qwen3-1.7B", _qwen3(28, 2048, 6144, 16, tied=True)),
    Entry("Qwen/Qwen3-4B", _qwen3(36, 2560, 9728, 32, tied=True)),
    Entry("Qwen/Qwen3-8B", _qwen3(36, 4096, 12_288, 32)),
    Entry("Qwen/Qwen3-14B", _qwen3(40, 5120, 17_408, 40)),
    Entry("Qwen/Qwen3-32B", _qwen3(64, 5120, 25_600, 64)),
    Entry("Qwen/Qwen3-30B-A3B", _qwen3_moe(48, 2048, 6144, 32, 4, 768)),
    Entry("Qwen/Qwen3-235B-A22B", _qwen3_moe(94, 4096, 12_288, 64, 4, 1536)),
    Entry("mistralai/Mistral-7B-v0.1", _mistral(32, 4096, 14_336, 32, 32_000, 32_768, sliding_window=4096)),
    Entry("mistralai/Mistral-7B-Instruct-v0.2", _mistral(32, 4096, 14_336, 32, 32_000, 32_768)),
    Entry("mistralai/Mistral-7B-v0.3", _mistral(32, 4096, 14_336, 32, 32_768, 32_768), ("mistral-7b",)),
    Entry(
        "mistralai/Mistral-Small-24B-Base-2501",
        _mistral(40, 5120, 32_768, 32, 131_072, 32_768),
        ("mistral-small", "mistral-small-24b", "Mistral-Small-24B-Instruct-2501"),
    ),
    Entry("mistralai/Mixtral-8x7B-v0.1", _mixtral(32, 4096, 14_336, 32, 32_000, 32_768), ("mixtral-8x7b",)),
    Entry("mistralai/Mixtral-8x22B-v0.1", _mixtral(56, 6144, 16_384, 48, 32_000, 65_536), ("mixtral-8x22b",)),
    Entry("deepseek-ai/DeepSeek-V3", _DEEPSEEK_V3, ("DeepSeek-V3-0324", "DeepSeek-V3.1", "deepseek-671b")),
    Entry("deepseek-ai/DeepSeek-R1", _DEEPSEEK_V3, ("DeepSeek-R1-0528",)),
    Entry("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", _qwen2(28, 1536, 8960, 12, 2, 151_936, 131_072)),
    Entry("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", _qwen2(28, 3584, 18_944, 28, 4, 152_064, 131_072)),
    Entry("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", _qwen2(48, 5120, 13_824, 40, 8, 152_064, 131_072)),
    Entry("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", _qwen2(64, 5120, 27_648, 40, 8, 152_064, 131_072)),
    Entry("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", _LLAMA31_8B),
    Entry("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", _LLAMA31_70B, ("deepseek-70b",)),
    Entry("google/gemma-2-2b", _gemma2(26, 2304, 9216, 8, 4, 256)),
    Entry("google/gemma-2-9b", _gemma2(42, 3584, 14_336, 16, 8, 256)),
    Entry("google/gemma-2-27b", _gemma2(46, 4608, 36_864, 32, 16, 128)),
    Entry(
        "google/gemma-3-1b-it",
        _gemma3(26, 1152, 6912, 4, 1, 256, vocab=262_144, context=32_768, window=512),
        ("gemma-3-1b",),
    ),
    Entry("google/gemma-3-4b-it", _gemma3(34, 2560, 10_240, 8, 4, 256), ("gemma-3-4b",)),
    Entry("google/gemma-3-12b-it", _gemma3(48, 3840, 15_360, 16, 8, 256), ("gemma-3-12b",)),
    Entry("google/gemma-3-27b-it", _gemma3(62, 5376, 21_504, 32, 16, 128), ("gemma-3-27b",)),
    Entry("microsoft/Phi-3-mini-4k-instruct", _phi3(32, 3072, 8192, 32, 32, 32_064, 4096), ("phi-3-mini",)),
    Entry("microsoft/Phi-3-medium-4k-instruct", _phi3(40, 5120, 17_920, 40, 10, 32_064, 4096), ("phi-3-medium",)),
    Entry("microsoft/phi-4", _phi3(40, 5120, 17_920, 40, 10, 100_352, 16_384)),
    Entry(
        "HuggingFaceTB/SmolLM2-135M", _llama(30, 576, 1536, 9, 3, 49_152, 8192, tie_word_embeddings=True), ("smollm2",)
    ),
    Entry("HuggingFaceTB/SmolLM2-360M", _llama(32, 960, 2560, 15, 5, 49_152, 8192, tie_word_embeddings=True)),
    Entry("HuggingFaceTB/SmolLM2-1.7B", _llama(24, 2048, 8192, 32, 32, 49_152, 8192, tie_word_embeddings=True)),
    Entry("openai/gpt-oss-20b", _GPT_OSS_20B),
    Entry("openai/gpt-oss-120b", _GPT_OSS_20B | {"num_hidden_layers": 36, "num_local_experts": 128}),
)

_SUFFIXES = ("-instruct", "-it", "-chat", "-base", "-hf", "-chat-hf", "-2507", "-fp8", "-bf16")


def find_entry(name: str) -> Entry:
    """Find a built-in shape by hub id or short form; `-Instruct` and the like do not matter."""
    wanted = _plain(name)
    for entry in CATALOGUE:
        if wanted in names_of(entry):
            return entry
    known = [entry.hub_id for entry in CATALOGUE]
    short = {hub_id.partition("/")[2].lower(): hub_id for hub_id in known}
    raise ModelError(
        f"no built-in shape {name!r}{nearest(name, known) or nearest(name.lower(), short)}; give one of the built-in "
        "names ('headrace plan --list'), a directory, a config.json or a GGUF file"
    )


def names_of(entry: Entry) -> set[str]:
    return {_plain(name) for name in (entry.hub_id, *entry.names)}


def _plain(name: str) -> str:
    plain = name.lower().rpartition("/")[2].removeprefix("meta-").replace("_", "-")
    while True:
        shorter = plain
        for suffix in _SUFFIXES:
            shorter = shorter.removesuffix(suffix)
        if shorter == plain:
            return plain
        plain = shorter
