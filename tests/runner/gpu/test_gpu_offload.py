"""Layers that stream from host memory: the answers of a GPU are the same as with all weights in its memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.engine import offloading
from headrace.runner.gpu.decode_graphs import DecodeGraphs
from headrace.runner.gpu.pinned_memory import pinned_memory
from tests.engine.tiny import save_model

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
ALL_LAYERS = 1.0  # GiB: more than the tiny models have
PROMPTS = [[3 + i, 5, 7 * i + 2, 11] * (1 + i % 9) for i in range(24)]
WIDE = {  # 120 MB a layer in bfloat16: a copy takes several times as long as the layer
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def same_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which graph is the fastest is not measured, so that all engines take the same ones, and round alike."""
    monkeypatch.setattr(DecodeGraphs, "_find_fast_sizes", lambda graphs, _: {size: size for size in graphs._sizes})


def answers(model: str, prompts: list[list[int]], **settings: Any) -> list[tuple[int, ...]]:
    """Of all prompts at once, then of one alone: a step of one row has kernels of its own."""
    common = {"max_num_seqs": 32, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 400}
    with LLM(model, dtype="bfloat16", **common | settings) as llm:
        outputs = [*llm.generate(prompts, GREEDY, use_tqdm=False), *llm.generate(prompts[:1], GREEDY, use_tqdm=False)]
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"quantization": "fp8"}),
        ("llama", {"quantization": "int8"}),
        ("llama", {"quantization": "int4"}),
        ("qwen3_moe", {}),
        ("gemma3", {}),
    ],
    ids=["bf16", "fp8", "int8", "int4", "mixture", "gemma 3"],
)
def test_streamed_layers_give_the_same_answers(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    save_model(tmp_path, family)
    expected = answers(str(tmp_path), PROMPTS, **settings)
    assert answers(str(tmp_path), PROMPTS, cpu_offload_gb=ALL_LAYERS, **settings) == expected


@pytest.mark.parametrize("cpu_offload_gb", [0.15, 10.0])
def test_layers_whose_copies_are_slow_give_the_same_answers(cpu_offload_gb: float, tmp_path: Path) -> None:
    """Four of six layers, then all."""
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    expected = answers(str(tmp_path), PROMPTS, load_format="random")
    assert answers(str(tmp_path), PROMPTS, load_format="random", cpu_offload_gb=cpu_offload_gb) == expected


@pytest.mark.parametrize("host_gib", [0.3, 0.6])
def test_layers_from_a_disk_give_the_same_answers(
    host_gib: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All six layers of 0.11 GiB on the disk, then three. Steps without graphs round otherwise, since they have another
    attention kernel for few decodes, so random answers may differ late: most of the tokens are the same."""
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    expected = answers(str(tmp_path), PROMPTS, load_format="random")
    monkeypatch.setattr(offloading, "HOST_SHARE", host_gib * 2**30 / psutil.virtual_memory().available)
    disk = {"cpu_offload_gb": 10.0, "cpu_offload_path": str(tmp_path / "disk")}
    found = answers(str(tmp_path), PROMPTS, load_format="random", **disk)
    same = [ours == theirs for a, b in zip(found, expected, strict=True) for ours, theirs in zip(a, b, strict=True)]
    assert sum(same) > 0.75 * len(same)


def test_the_gpu_holds_less_by_what_streams(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    settings = {"load_format": "random", "dtype": "bfloat16", "num_gpu_blocks_override": 16, "max_num_seqs": 4}
    used = []
    for cpu_offload_gb in (0.0, 0.3):
        with LLM(str(tmp_path), cpu_offload_gb=cpu_offload_gb, **settings):
            used.append(torch.cuda.memory_allocated())
    assert used[0] - used[1] == pytest.approx(0.3 * 2**30, rel=0.3)


def test_pinned_memory_is_registered_and_given_back() -> None:
    run = pinned_memory(3 << 20)
    assert run.is_pinned() and run.numel() == 3 << 20
    address = run.data_ptr()
    del run
    again = pinned_memory(3 << 20)  # may have the same address, which must not be registered still
    assert again.is_pinned() and address
