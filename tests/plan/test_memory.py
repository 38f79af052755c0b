"""What fits is what the engine itself would decide."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.engine.resolve import resolve
from headrace.hardware import GpuFacts, MachineFacts
from headrace.models.cache import EMBEDDED_BITS
from headrace.models.hub_config import spec_from_config
from headrace.plan.catalogue import CATALOGUE
from headrace.plan.gpus import GIB, cpu, find_gpu
from headrace.plan.memory import fit, weight_bytes
from headrace.plan.precision import Precision
from headrace.plan.prediction import predict
from headrace.plan.settings import PlanSettings
from headrace.plan.shape import shape_of_spec
from headrace.plan.source import find_shape
from headrace.plan.workload import uniform
from tests.models.test_published_configs import CONFIGS

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
B200 = find_gpu("B200")
RUNNABLE = [entry.hub_id for entry in CATALOGUE if find_shape(entry.hub_id).spec is not None]


@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.parametrize("weights", ["bfloat16", "fp8"])
def test_a_plan_agrees_with_the_engine(name: str, weights: str) -> None:
    shape, is_fp8 = find_shape(name), weights == "fp8"
    assert shape.spec is not None
    precision = Precision("fp8", "fp8") if is_fp8 else Precision()
    found = fit(shape, B200, precision, PlanSettings(max_model_len=4096))
    fp8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"} if is_fp8 else {}
    config = EngineConfig(device="cuda", max_model_len=4096, **fp8)  # type: ignore[arg-type]
    gpu = GpuFacts(B200.title, B200.memory_bytes, B200.memory_bytes, B200.capability)
    facts = MachineFacts("a cpu", 1, 1 << 36, 1 << 36, gpu)
    if found.settings is None:
        with pytest.raises(ValueError, match="leave no room"):
            resolve(config, shape.spec, facts)
        return
    expected = resolve(config, shape.spec, facts)
    assert found.settings.num_blocks == expected.num_blocks
    assert found.settings.max_num_seqs == expected.max_num_seqs
    assert found.settings.max_num_batched_tokens == expected.max_num_batched_tokens


@pytest.mark.parametrize("name", ["Qwen/Qwen3.5-27B", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"])
def test_a_plan_counts_recurrent_states_as_the_engine_does(name: str) -> None:
    spec = spec_from_config(CONFIGS[name])
    found = fit(shape_of_spec(name, spec), B200, Precision(), PlanSettings(max_model_len=4096))
    gpu = GpuFacts(B200.title, B200.memory_bytes, B200.memory_bytes, B200.capability)
    facts = MachineFacts("a cpu", 1, 1 << 36, 1 << 36, gpu)
    expected = resolve(EngineConfig(device="cuda", max_model_len=4096), spec, facts)
    assert found.settings is not None and found.memory.states > 0
    assert found.settings.num_blocks == expected.num_blocks
    assert found.settings.max_num_seqs == expected.max_num_seqs


def test_the_planned_cache_is_within_one_percent_of_every_newest_record() -> None:
    rows = [json.loads(line) for line in (RESULTS / "offline-h200.jsonl").read_text(encoding="utf-8").splitlines()]
    newest = {(row["model"], row["dtype"]): row for row in rows}
    assert len(newest) == 5
    for (model, dtype), row in newest.items():
        precision = Precision("fp8", "fp8") if dtype == "fp8" else Precision()
        found = fit(find_shape(model), find_gpu("H200"), precision, PlanSettings(max_model_len=4096))
        assert found.settings is not None
        num_blocks, max_num_seqs = (
            int(str(row["settings"][name]).replace(",", "")) for name in ("num_blocks", "max_num_seqs")
        )
        assert found.settings.num_blocks == pytest.approx(num_blocks, rel=0.01)
        assert found.settings.max_num_seqs == max_num_seqs


def test_fewer_bits_take_fewer_bytes_but_embeddings_keep_theirs() -> None:
    shape = find_shape("llama-3.1-8b")
    kept = 4 * 4096 * 14336  # four down projections keep their 16 bits too
    narrow, rows = shape.linear_params - kept, 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096) - 4 * 4096
    plain = 2 * (shape.num_params - narrow)
    copies = 128_256 * (4096 + 4) + 4 * 4096 * (14336 + 4)  # of the head and what is kept, in INT8
    assert weight_bytes(shape, Precision()) == 2 * shape.num_params
    assert weight_bytes(shape, Precision("fp8")) == plain + copies + narrow + 4 * rows  # and scales
    assert weight_bytes(shape, Precision("int4")) == pytest.approx(plain + copies + narrow * 4.25 / 8, rel=1e-6)


def test_the_bytes_of_a_model_do_not_depend_on_what_was_planned_before() -> None:
    precision, shape = Precision("float32", is_wide=True), find_shape("HuggingFaceTB/SmolLM2-135M")
    packed = replace(shape, spec=replace(shape.spec, packed_bits=EMBEDDED_BITS))
    assert weight_bytes(packed, precision) < weight_bytes(shape, precision) * 0.3
    assert weight_bytes(shape, precision) == 4 * shape.num_params


def test_the_default_model_is_planned_on_a_cpu_as_its_file_stores_it() -> None:
    machine, workload = cpu(bandwidth=5e10, flops=4e11, memory_bytes=16 << 30), uniform(64, 64, num_requests=1)
    names = ("smollm2", "HuggingFaceTB/SmolLM2-135M")
    found, plain = (predict(find_shape(name), machine, workload, PlanSettings()) for name in names)
    assert found.precision.label == "fp32, weights of 5.0 bits"
    assert found.memory.weights < plain.memory.weights * 0.3
    assert found.speed is not None and plain.speed is not None
    assert found.speed.seconds < plain.speed.seconds * 0.7


@pytest.mark.parametrize(("name", "wish"), [("smollm2", "auto"), ("smollm2", "fp8"), ("qwen3-0.6b", "float16")])
def test_a_plan_counts_the_cache_of_a_cpu_as_the_engine_does(name: str, wish: str) -> None:
    shape, memory_bytes = find_shape(name), 8 << 30
    machine, settings = cpu(bandwidth=5e10, flops=4e11, memory_bytes=memory_bytes), PlanSettings(kv_cache_dtype=wish)
    found = predict(shape, machine, uniform(64, 64, num_requests=1), settings)
    assert shape.spec is not None
    facts = MachineFacts("a cpu", 2, memory_bytes, memory_bytes)
    expected = resolve(EngineConfig(kv_cache_dtype=wish), shape.spec, facts)  # type: ignore[arg-type]
    assert found.memory.cache_tokens == expected.num_blocks * expected.block_size


def test_experts_that_are_published_in_four_bits_take_the_bytes_that_they_have_after_loading() -> None:
    shape = find_shape("gpt-oss-120b")
    assert weight_bytes(shape, Precision()) == 2 * shape.num_params


def test_tensor_parallelism_divides_weights_and_cache_and_copies_heads_that_are_too_few() -> None:
    shape, gpu, settings = find_shape("qwen3-30b-a3b"), find_gpu("H100"), PlanSettings()
    two, eight = (fit(shape, gpu, Precision(), settings, tensor=size).memory for size in (2, 8))
    assert two.weights == pytest.approx(4 * eight.weights, rel=1e-6)
    assert two.bytes_per_token == 2 * eight.bytes_per_token  # 4 key-value heads: copied twice over 8 GPUs


def test_what_does_not_fit_says_how_much_is_missing() -> None:
    memory = fit(find_shape("llama-3.3-70b"), find_gpu("H100"), Precision(), PlanSettings()).memory
    assert not memory.fits
    assert memory.weights + memory.activations + memory.runtime - memory.allowed <= memory.shortfall
    assert memory.concurrency(100) == 0


def test_weights_in_host_memory_make_room_and_cost_what_the_bus_takes() -> None:
    """Llama 70B in 16 bits has 131 GiB, of which an H200 cannot hold a cache as well."""
    workload = uniform(500, 200, num_requests=64)
    without = predict("llama-3.3-70b", "H200", workload)
    found = predict("llama-3.3-70b", "H200", workload, PlanSettings(cpu_offload_gb=40))
    assert not without.fits or without.memory.cache < found.memory.cache
    assert found.memory.weights <= without.memory.weights - 40 * GIB
    assert found.speed is not None
    streamed, link = found.memory.streamed.num_bytes, find_gpu("H200").host_link
    assert found.speed.tpot_s > streamed / link.copy_bytes_per_s
    assert found.speed.phases["bus"] > 0.8 * found.speed.seconds
    assert any("stream from host memory" in note for note in found.notes)
