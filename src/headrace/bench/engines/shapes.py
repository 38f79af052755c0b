"""Public model shapes that a benchmark runs with random weights: speed does not depend on their values."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from headrace.models.digests import digest_of_local_model

MAX_MODEL_LEN = 4096  # of a shape for which none is given: its own context would take all of the KV cache's reserve

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
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
    "attention_bias": False,
    "head_dim": 128,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
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
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
    },
    "qwen3-30b-a3b": _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}


def model_identity(model: str) -> dict[str, Any]:
    """Name and digest of a model, the same for every engine that runs it."""
    if model not in SHAPES:
        return {"name": model, "digest": digest_of_local_model(model)}
    config = json.dumps(SHAPES[model], sort_keys=True).encode()
    return {"name": model, "digest": blake2b(config, digest_size=16).hexdigest(), "weights": "random"}


def write_shape(directory: Path, config: Mapping[str, Any]) -> None:
    """Write config.json and a stand-in tokenizer: what an engine needs for random weights."""
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory, config["vocab_size"])


@contextmanager
def shape_directory(name: str) -> Iterator[Path]:
    """A temporary model directory of a shape."""
    with tempfile.TemporaryDirectory(prefix="headrace-shape-") as directory:
        write_shape(Path(directory), SHAPES[name])
        yield Path(directory)


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write a stand-in tokenizer: the bytes, then an invented word for each remaining id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {f"<w{i}>": i for i in range(len(vocab), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    # For tokenizers that transformers loads, as vLLM does.
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
