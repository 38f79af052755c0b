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


def test_a_cpu_dequantizes() -> None:
    found = resolved(INT4, is_gpu=False)
    assert found.quantization is None
    assert "a CPU computes in float32" in reason(found, "quantization")


def test_weights_alone_in_eight_bits_are_dequantized() -> None:
    assert resolved(FP8_ALONE).quantization is None


def test_another_kind_than_the_stored_one_is_refused() -> None:
    assert resolved(INT4, quantization="int4").quantization == "int4"
    with pytest.raises(ConfigError, match=r"quantization='fp8' does not fit .* are int4 \(awq\); leave it out"):
        resolved(INT4, quantization="fp8")


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantizing_at_load_needs_a_gpu(kind: str) -> None:
    with pytest.raises(ConfigError, match="needs a GPU; a CPU computes in float32"):
        resolved(None, is_gpu=False, quantization=kind)
