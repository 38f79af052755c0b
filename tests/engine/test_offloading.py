"""Weights in host memory: which layers stream, what the GPU gains, and what the user is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.engine.memory_budget import GIB
from headrace.engine.resolve import resolve
from headrace.engine.settings import Settings
from headrace.errors import ConfigError
from headrace.hardware import GpuFacts, MachineFacts
from headrace.hardware.host_link import pcie
from tests.engine.small_spec import SMALL_SPEC

SPEC = replace(  # 0.875 GiB a layer in 16 bits, and embeddings of 0.5 GiB
    SMALL_SPEC,
    vocab_size=65536,
    hidden_size=4096,
    intermediate_size=32768,
    num_layers=32,
    num_heads=64,
    num_kv_heads=64,
    head_dim=64,
    max_model_len=1024,
    windows=(None,) * 32,
    tie_embeddings=True,
)
GPU = GpuFacts("a gpu", 24 * GIB, 23 * GIB, (9, 0), step_memory=GIB, host_link=pcie(5))
FACTS = MachineFacts("a cpu", 8, total_memory=128 * GIB, free_memory=64 * GIB, gpu=GPU)


def resolved(facts: MachineFacts = FACTS, **config: Any) -> Settings:
    return resolve(EngineConfig(**config), SPEC, facts)


def reason(settings: Settings, name: str) -> str:
    return next(choice.reason for choice in settings.choices if choice.name == name)


def test_a_model_larger_than_the_gpu_fits_with_its_layers_in_host_memory() -> None:
    with pytest.raises(ConfigError, match="leave no room for a KV cache"):
        resolved()
    settings = resolved(cpu_offload_gb=16)
    assert settings.cpu_offload_gb == 16
    assert reason(settings, "cpu_offload_gb").startswith("21 of 32 layers stream from 18.38 GiB")


def test_the_kv_cache_gets_what_is_freed() -> None:
    few, more = (resolved(cpu_offload_gb=gib, max_num_seqs=512) for gib in (16, 18))
    block_bytes = SPEC.kv_elements_per_token * 2 * 16
    assert (more.num_blocks - few.num_blocks) * block_bytes == pytest.approx(2 * GIB, rel=0.4)  # whole layers
    assert more.num_blocks > few.num_blocks


def test_fewer_layers_stream_if_they_are_quantized_and_that_is_enough() -> None:
    assert reason(resolved(cpu_offload_gb=4, quantization="fp8"), "cpu_offload_gb").startswith("12 of 32 layers")


def test_the_warning_says_what_the_bus_allows() -> None:
    (warning,) = (text for text in resolved(cpu_offload_gb=16, max_num_seqs=100).warnings if "copies" in text)
    assert "at 54 GB/s (PCIe 5.0 x16)" in warning and "tokens/s, and 100 together up to" in warning
    unknown = replace(FACTS, gpu=replace(GPU, host_link=None))
    assert any("PCIe 4.0 x16 is assumed" in text for text in resolved(unknown, cpu_offload_gb=16).warnings)


def test_a_cpu_ignores_it_and_says_why() -> None:
    settings = resolved(replace(FACTS, gpu=None), cpu_offload_gb=4, gpu_memory_utilization=1.0)
    assert settings.cpu_offload_gb == 0
    assert "all weights are in host memory" in reason(settings, "cpu_offload_gb")


def test_more_than_the_free_host_memory_is_refused_with_the_numbers() -> None:
    little = replace(FACTS, free_memory=8 * GIB)
    with pytest.raises(ConfigError, match=r"needs 18\.\d GiB of host memory, and 8.0 GiB are free"):
        resolved(little, cpu_offload_gb=16)


def test_layers_that_do_not_fit_in_host_memory_are_on_the_disk() -> None:
    little = replace(FACTS, free_memory=8 * GIB)
    settings = resolved(little, cpu_offload_gb=16, cpu_offload_path="/disk")
    assert (settings.cpu_offload_path, settings.cpu_offload_host_bytes) == ("/disk", int(7.2 * GIB))
    # 6 layers of 0.875 GiB and two staging buffers are 7 GiB
    expected = (
        "21 of 32 layers stream from 7.00 GiB of host memory and 13.13 GiB on disk (15 layers), without CUDA graphs"
    )
    assert reason(settings, "cpu_offload_gb").startswith(expected)
    assert any("reads 13.1 GiB of weights from a disk" in text for text in settings.warnings)
    assert settings.num_blocks == resolved(cpu_offload_gb=16).num_blocks


def test_a_disk_is_not_used_where_host_memory_is_enough() -> None:
    settings = resolved(cpu_offload_gb=16, cpu_offload_path="/disk")
    assert settings.cpu_offload_path is None
    assert "cpu_offload_path is not needed" in reason(settings, "cpu_offload_gb")


@pytest.mark.parametrize(
    ("free_gib", "settings", "message"),
    [
        (1, {}, "GiB of host memory, and 1.0 GiB are free"),  # two staging buffers do not fit
        (8, {"speculative_config": {"num_speculative_tokens": 2}}, "not supported with layers in cpu_offload_path"),
        (8, {"cpu_offload_gb": 0}, "cpu_offload_gb, which is not set"),
        (8, {"cpu_offload_path": ""}, "cpu_offload_path must be a directory"),
    ],
)
def test_a_disk_that_cannot_be_used_is_refused(free_gib: int, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(
            replace(FACTS, free_memory=free_gib * GIB), **{"cpu_offload_gb": 16, "cpu_offload_path": "/disk"} | settings
        )


def test_drafting_with_the_first_layers_is_refused() -> None:
    drafts = {"method": "early_exit", "num_layers": 4, "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match="early_exit"):
        resolved(cpu_offload_gb=16, speculative_config=drafts)


def test_a_number_that_is_no_size_is_refused() -> None:
    for value in (-1, "8", float("nan"), True):
        with pytest.raises(ConfigError, match="cpu_offload_gb must be a number of GiB"):
            EngineConfig(cpu_offload_gb=value)  # type: ignore[arg-type]
