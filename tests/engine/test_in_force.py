"""Every setting in force, with its source and reason."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.engine.in_force import memory_share, settings_in_force, shape_of
from headrace.engine.resolve import resolve
from headrace.engine.settings import Settings
from headrace.hardware import GpuFacts, MachineFacts
from tests.engine.small_spec import SMALL_SPEC

SPEC = replace(SMALL_SPEC, vocab_size=512, max_model_len=2048)
GPU = GpuFacts("NVIDIA H200", 140 << 30, 139 << 30, (9, 0))


def found(config: EngineConfig, *, gpu: GpuFacts | None = None, given: tuple[str, ...] = ()) -> dict[str, Any]:
    settings = resolve(config, SPEC, MachineFacts("a CPU", 4, 16 << 30, 8 << 30, gpu))
    in_force = settings_in_force(settings, config, given)
    return {name: (setting.value, setting.source, setting.reason) for name, setting in in_force.items()}


# The last ones are told by the memory of the states, and by the size of the host tier.
UNNAMED = {"adapters", "choices", "warnings", "has_recurrent_state", "host_block_bytes"}


def test_every_field_of_config_and_settings_is_there() -> None:
    names = found(EngineConfig()).keys()
    assert {field.name for field in fields(EngineConfig)} <= names
    renamed = {"kv_dtype": "kv_cache_dtype", "queue_policy": "scheduling_policy"}
    assert {renamed.get(field.name, field.name) for field in fields(Settings)} - UNNAMED <= names


def test_sources_are_told_apart() -> None:
    told = found(EngineConfig(max_num_seqs=4, enable_prefix_caching=False), given=("block_size",))
    assert told["max_num_seqs"] == (4, "given", "")
    assert told["enable_prefix_caching"] == (False, "given", "")
    assert told["block_size"] == (16, "given", "")  # equal to the default, but named
    assert told["capacity_policy"] == ("max_utilization", "default", "")
    assert told["max_model_len"] == (2048, "automatic", "the model's own context")
    assert told["kv_cache_dtype"] == ("float32", "automatic", "the same as dtype")
    assert told["quantization"] == (None, "default", "")


@pytest.mark.parametrize(
    ("config", "gpu", "share"),
    [
        (EngineConfig(), None, (0.5, "automatic", "of the free memory")),
        (EngineConfig(), GPU, (0.92, "automatic", "of the GPU's memory")),
        (EngineConfig(gpu_memory_utilization=0.7), GPU, (0.7, "given", "")),
        (
            EngineConfig(num_gpu_blocks_override=256),
            GPU,
            (None, "default", "not used: the size of the KV cache is set"),
        ),
    ],
)
def test_the_share_of_memory_is_told(config: EngineConfig, gpu: GpuFacts | None, share: tuple[Any, ...]) -> None:
    assert found(config, gpu=gpu)["gpu_memory_utilization"] == share


def test_the_number_of_blocks_is_given_or_automatic() -> None:
    assert found(EngineConfig(num_gpu_blocks_override=256))["num_blocks"][:2] == (256, "given")
    assert found(EngineConfig())["num_blocks"][1] == "automatic"
    told = found(EngineConfig(num_gpu_blocks_override=256, block_size=8))
    assert told["kv_cache_size_tokens"][0] == 2048


def test_the_shape_of_a_model_has_its_size() -> None:
    shape = shape_of(SPEC)
    assert (shape["num_params"], shape["vocab_size"], shape["num_experts"]) == (SPEC.num_params, 512, None)


@pytest.mark.parametrize(
    ("config", "share"),
    [
        (EngineConfig(), 0.92),
        (EngineConfig(gpu_memory_utilization=0.7), 0.7),
        (EngineConfig(gpu_memory_utilization=0.7, num_gpu_blocks_override=500), None),
    ],
)
def test_the_memory_share_is_the_one_that_decided_the_cache(config: EngineConfig, share: float | None) -> None:
    settings = resolve(config, SPEC, MachineFacts("a CPU", 4, 16 << 30, 8 << 30, GPU))
    assert memory_share(settings, config) == share
