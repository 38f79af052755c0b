"""Compiles the kernels that starts of models of every kind launch, for one architecture, on a machine without a GPU.

Run as a program, without Triton's interpreter, with a compute capability such as 9.0. Prints one JSON object per
kernel, and fails as a compilation on such a GPU would.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from headrace.config import EngineConfig
from headrace.engine.dry_start import DryStart
from headrace.errors import ConfigError
from headrace.hardware import GpuFacts
from tests.kernels.dependent_launches import broken_rules

CONFIGS = Path(__file__).parents[1] / "models" / "data" / "published_configs.jsonl"
MEMORY = 1 << 42  # enough for each of them
# Kernels of sampling depend on the vocabulary: with one for all, they are compiled once.
ALIKE = {"vocab_size": 32_768, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
EARLY_EXIT = {"method": "early_exit", "num_layers": 2, "num_speculative_tokens": 3}
BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "position_embedding_type": "absolute",
    "torch_dtype": "float32",
}
MODERN_BERT = {
    "architectures": ["ModernBertModel"],
    "model_type": "modernbert",
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
    "torch_dtype": "float32",
}
# A published config, or one from above, and settings.
KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Qwen/Qwen3-8B", {"speculative_config": EARLY_EXIT}),
    ("llama3_2_1b", {"kv_offload_gib": 0.5}),
    ("llama3_2_1b", {"dtype": "float16", "quantization": "int4"}),
    ("llama3_2_1b", {"quantization": "int8", "max_num_seqs": 64}),
    ("llama3_2_1b", {"enable_lora": True, "max_lora_rank": 32, "max_num_seqs": 64}),
    ("llama3_2_1b", {"quantization": "fp8", "kv_cache_dtype": "fp8", "max_num_seqs": 64}),
    ("Qwen/Qwen3-32B-FP8", {"max_num_seqs": 64}),
    ("Qwen/Qwen3-30B-A3B", {}),
    ("Qwen/Qwen3-30B-A3B", {"quantization": "fp8"}),
    ("Qwen/Qwen3-30B-A3B", {"quantization": "int4"}),
    ("deepseek_v2_lite", {"max_num_seqs": 64, "kv_offload_gib": 0.5}),
    ("deepseek-ai/DeepSeek-V3", {"kv_cache_dtype": "fp8", "max_num_seqs": 64}),
    ("gemma2_9b", {"max_num_seqs": 64}),
    ("openai/gpt-oss-20b", {"max_num_seqs": 64}),
    ("bigscience/bloom-560m", {"max_num_seqs": 64}),
    ("Qwen/Qwen3.5-35B-A3B", {"max_num_seqs": 64}),
    ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {"max_num_seqs": 64}),
    ("bert", {}),
    ("modernbert", {}),
)


def starts(capability: tuple[int, int]) -> Iterator[DryStart]:
    """Of the kinds that run on this architecture; the names of the others go to stderr with the reason."""
    lines = map(json.loads, CONFIGS.read_text(encoding="utf-8").splitlines())
    configs = {line["checkpoint"]: line["config"] for line in lines} | {"bert": BERT, "modernbert": MODERN_BERT}
    gpu = GpuFacts(f"a GPU of {capability}", MEMORY, MEMORY, capability)
    for name, settings in KINDS:
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(_alike(configs[name])))
            length = 512 if name.endswith("bert") else 2048
            config = EngineConfig(model=directory, load_format="random", max_model_len=length, **settings)
            try:
                yield DryStart.of(config, gpu)
            except ConfigError as error:
                sys.stderr.write(f"refused: {name} {settings}: {error}\n")


def _alike(config: dict[str, Any]) -> dict[str, Any]:
    text = {"text_config": config["text_config"] | ALIKE} if "text_config" in config else {}
    return config | ALIKE | text


def main(capability: tuple[int, int]) -> None:
    from headrace.kernels.gpu import flash
    from headrace.kernels.gpu.architectures import Architecture
    from headrace.kernels.gpu.compile_pool import compile_all
    from headrace.kernels.gpu.launches import compile_launch, set_target

    launches = dict.fromkeys(launch for start in starts(capability) for launch in start.launches())
    if capability == (9, 0):  # as if FlashAttention-3 were installed
        with mock.patch.object(flash, "is_available", return_value=True), mock.patch.object(flash, "_attend"):
            launches |= dict.fromkeys(next(starts(capability)).launches())
    set_target(Architecture(capability))
    compile_all(launches, num_processes=os.cpu_count() or 1)
    for launch in launches:
        compiled = compile_launch(launch)  # from the cache
        facts = {"function": launch.function, "constants": launch.constants, "options": launch.options}
        facts |= {"shared_bytes": compiled.shared_bytes, "types": launch.types}
        facts["breaks"] = broken_rules(compiled.ptx) if launch.options.get("launch_pdl") else []
        sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    major, minor = sys.argv[1].split(".")
    main((int(major), int(minor)))
