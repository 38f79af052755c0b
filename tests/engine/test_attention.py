"""Which kernels of attention an engine uses, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.engine.attention import FLASH_HEAD_DIMS, choose_attention
from headrace.errors import ConfigError
from headrace.hardware import GpuFacts
from tests.engine.test_resolve import GIB, GPU
from tests.engine.test_resolve import SPEC as TINY

SPEC = replace(TINY, head_dim=128)
H200 = replace(GPU, name="NVIDIA H200")
A100 = GpuFacts("NVIDIA A100", 80 * GIB, 79 * GIB, (8, 0))


def test_flash_attention_is_chosen_where_it_runs() -> None:
    chosen = choose_attention("auto", SPEC, "bfloat16", H200)
    assert chosen.name == "FLASH_ATTN" and "prefills" in chosen.reason


@pytest.mark.parametrize(
    ("gpu", "dtype", "changes", "reason"),
    [
        (A100, "bfloat16", {}, "NVIDIA A100 has 8.0"),
        (replace(H200, has_flash_attention=False), "bfloat16", {}, "fa3-fwd is not installed"),
        (H200, "float16", {}, "the model float16"),
        (H200, "bfloat16", {"head_dim": 80}, "heads of 80 dimensions"),
        (H200, "bfloat16", {"has_sinks": True}, "attention sinks"),
    ],
)
def test_own_kernels_are_chosen_elsewhere_with_the_reason(
    gpu: GpuFacts, dtype: str, changes: dict[str, Any], reason: str
) -> None:
    spec = replace(SPEC, **changes)
    chosen = choose_attention("auto", spec, dtype, gpu)
    assert chosen.name == "TRITON_ATTN" and reason in chosen.reason
    with pytest.raises(ConfigError, match="'FLASH_ATTN' does not run here"):
        choose_attention("FLASH_ATTN", spec, dtype, gpu)


def test_a_backend_that_is_set_is_used() -> None:
    assert choose_attention("TRITON_ATTN", SPEC, "bfloat16", H200) == ("TRITON_ATTN", "as set")


def test_a_cpu_takes_no_backend() -> None:
    assert choose_attention("auto", SPEC, "float32", None).name == "CPU_ATTN"
    with pytest.raises(ConfigError, match="needs a GPU"):
        choose_attention("TRITON_ATTN", SPEC, "float32", None)


def test_a_backend_of_vllm_that_headrace_has_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention_backend must be one of auto, FLASH_ATTN, TRITON_ATTN"):
        EngineConfig(attention_backend="FLASHINFER")  # type: ignore[arg-type]


def test_the_list_of_head_sizes_is_that_of_the_kernels() -> None:
    pytest.importorskip("triton")
    from headrace.kernels.gpu import flash

    assert flash._HEAD_DIMS == FLASH_HEAD_DIMS
