"""Settings of quantized weights: as the checkpoint stores them, or as set."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.config import EngineConfig
from headrace.engine.resolve import resolve
from headrace.engine.settings import Settings
from headrace.errors import ConfigError
from headrace.models.quantized import StoredQuantization
from tests.engine.test_resolve import GPU, SPEC, facts, reason

INT4 = StoredQuantization("awq", "int4", quantizes_activations=False)
INT8 = StoredQuantization("compressed-tensors", "int8")
FP8_ALONE = StoredQuantization("compressed-tensors", "fp8", quantizes_activations=False)


def resolved(stored: StoredQuantization | None, *, is_gpu: bool = True, **config: object) -> Settings:
    machine = replace(facts(), gpu=GPU) if is_gpu else facts()
    return resolve(EngineConfig(**config), replace(SPEC, quantization=stored), machine)  # type: ignore[arg-type]


def test_a_gpu_keeps_weights_as_the_checkpoint_stores_them() -> None:
    found = resolved(INT4)
    assert found.quantization == "int4"
    assert reason(found, "quantization") == "as stored (awq): weights of the layers in four bits"


def test_four_bits_leave_more_memory_for_the_cache_than_eight() -> None:
    blocks = [
        resolved(None, quantization=kind, max_num_seqs=16_384, gpu_memory_utilization=0.06).num_blocks
        for kind in (None, "int8", "int4")
    ]
    assert blocks == sorted(set(blocks))


def test_a_cpu_keeps_int8_and_dequantizes_others() -> None:
    found = resolved(INT4, is_gpu=False)
    assert found.quantization is None
    assert reason(found, "quantization").endswith("are dequantized: a CPU computes in float32 or INT8")
    assert resolved(INT8, is_gpu=False).quantization == "int8"


def test_a_cpu_without_its_instructions_dequantizes_int8() -> None:
    machine = replace(facts(), multiplies_int8=False)
    found = resolve(EngineConfig(), replace(SPEC, quantization=INT8), machine)
    assert found.quantization is None
    assert "INT8 needs x86 with AVX2" in reason(found, "quantization")
    with pytest.raises(ConfigError, match="quantization='int8' needs a GPU: this CPU computes in float32"):
        resolve(EngineConfig(quantization="int8"), SPEC, machine)


def test_weights_alone_in_eight_bits_are_dequantized() -> None:
    assert resolved(FP8_ALONE).quantization is None


def test_another_kind_than_the_stored_one_is_refused() -> None:
    assert resolved(INT4, quantization="int4").quantization == "int4"
    with pytest.raises(ConfigError, match=r"quantization='fp8' does not fit .* are int4 \(awq\); leave it out"):
        resolved(INT4, quantization="fp8")


def test_a_cpu_quantizes_at_load_to_int8_alone() -> None:
    found = resolved(None, is_gpu=False, quantization="int8")
    assert found.quantization == "int8"
    with pytest.raises(ConfigError, match="quantization='int4' needs a GPU: a CPU computes in float32 or INT8"):
        resolved(None, is_gpu=False, quantization="int4")
