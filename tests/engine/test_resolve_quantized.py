"""Settings of quantized weights: as the checkpoint stores them, or as set."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.config import EngineConfig
from headrace.engine.resolve import resolve
from headrace.engine.settings import Settings
from headrace.errors import ConfigError
from headrace.models.quantized import PackedBits, StoredQuantization
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


def test_a_cpu_keeps_int8_and_four_bits_and_dequantizes_fp8() -> None:
    assert resolved(INT8, is_gpu=False).quantization == "int8"
    assert reason(resolved(INT4, is_gpu=False), "quantization") == "as stored (awq): weights of the layers in four bits"
    found = resolved(replace(FP8_ALONE, quantizes_activations=True), is_gpu=False)
    assert found.quantization is None
    assert "are dequantized: a CPU computes in float32 or INT8" in reason(found, "quantization")


def test_a_cpu_without_their_instructions_dequantizes_int8_and_four_bits() -> None:
    machine = replace(facts(), multiplies_packed=False)
    for stored in (INT8, INT4):
        found = resolve(EngineConfig(), replace(SPEC, quantization=stored), machine)
        assert found.quantization is None
        assert "INT8 and four bits need x86 with AVX2" in reason(found, "quantization")
    with pytest.raises(ConfigError, match="quantization='int8' needs a GPU: this CPU computes in float32"):
        resolve(EngineConfig(quantization="int8"), SPEC, machine)


def test_a_cpu_keeps_the_bits_of_a_gguf_file() -> None:
    bits = PackedBits(layers=5.0, head=9.0, embeddings=8.5)
    spec = replace(SPEC, packed_bits=bits)
    found = resolve(EngineConfig(max_num_seqs=10_000), spec, facts())
    assert found.quantization is None
    assert reason(found, "quantization") == "weights keep the 5.0 bits of the GGUF file; GEMMs are in float32"
    assert found.num_blocks > resolve(EngineConfig(max_num_seqs=10_000), SPEC, facts()).num_blocks
    assert found.kv_dtype == "float16"
    assert "half the bytes to read" in reason(found, "kv_cache_dtype")
    for machine in (replace(facts(), multiplies_packed=False), replace(facts(), gpu=GPU)):
        plain, same = (resolve(EngineConfig(), each, machine) for each in (SPEC, spec))
        assert plain == same


def test_weights_alone_in_eight_bits_are_dequantized() -> None:
    assert resolved(FP8_ALONE).quantization is None


def test_another_kind_than_the_stored_one_is_refused() -> None:
    assert resolved(INT4, quantization="int4").quantization == "int4"
    with pytest.raises(ConfigError, match=r"quantization='fp8' does not fit .* are int4 \(awq\); leave it out"):
        resolved(INT4, quantization="fp8")


def test_a_cpu_quantizes_at_load_to_int8_and_four_bits() -> None:
    for kind in ("int8", "int4"):
        found = resolved(None, is_gpu=False, quantization=kind)
        assert (found.quantization, found.kv_dtype) == (kind, "float16")
    with pytest.raises(ConfigError, match="needs a GPU"):
        resolved(None, is_gpu=False, quantization="fp8")
