"""The offline workloads of docs/performance.md and the model shapes they run on.

Lengths and tokens are fixed by seed, the same for every measured engine. Weights are random: speed does not depend on
their values.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

TOKEN_RANGE = (1000, 100_000)


@dataclass(frozen=True)
class Task:
    prompt: list[int]
    num_tokens_out: int


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(*TOKEN_RANGE) for _ in range(count)]


def _long_tailed(rng: random.Random, log_mean: float, sigma: float, min_len: int, max_len: int) -> int:
    return max(min_len, min(max_len, int(rng.lognormvariate(log_mean, sigma))))


def chat() -> list[Task]:
    """2,000 conversations: short, long-tailed prompts and answers."""
    rng = random.Random(0)
    tasks = []
    for _ in range(2000):
        prompt = _tokens(rng, _long_tailed(rng, 4.8, 1.1, 4, 2048))
        tasks.append(Task(prompt, _long_tailed(rng, 5.0, 0.9, 4, 1024)))
    return tasks


def prefill() -> list[Task]:
    """1,000 documents of 2,048 tokens, 64 out: classification, extraction."""
    rng = random.Random(1)
    return [Task(_tokens(rng, 2048), 64) for _ in range(1000)]


def decode() -> list[Task]:
    """1,000 prompts of 128 tokens, 1,024 out: synthetic data."""
    rng = random.Random(2)
    return [Task(_tokens(rng, 128), 1024) for _ in range(1000)]


def prefix() -> list[Task]:
    """2,000 requests over 32 system prompts of 1,536 tokens, in random order, with 128 more tokens each and 128 out."""
    rng = random.Random(3)
    heads = [_tokens(rng, 1536) for _ in range(32)]
    return [Task(rng.choice(heads) + _tokens(rng, 128), 128) for _ in range(2000)]


WORKLOADS = {"chat": chat, "prefill": prefill, "decode": decode, "prefix": prefix}

_LLAMA3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
    "num_key_value_heads": 8,
}


def _rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _LLAMA3
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_scaling": _rope(32.0),
    },
    "llama-3.2-3b": _LLAMA3
    | {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "rope_scaling": _rope(32.0),
    },
    "llama-3.1-8b": _LLAMA3
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "rope_scaling": _rope(8.0),
    },
}
