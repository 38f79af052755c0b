from __future__ import annotations

from typing import Any

from headrace.tune.knobs import Demand, Knob, Space, find_knobs
from tests.tune.builders import DEFAULTS, workload

ALL = (*DEFAULTS, "num_threads", "gpu_memory_utilization", "kv_cache_dtype", "quantization", "max_queue_delay_us")


def a_space(**changes: Any) -> Space:
    given: dict[str, Any] = {
        "engine": "headrace",
        "serves": False,
        "in_force": {**DEFAULTS, "max_model_len": 8192},
        "demand": Demand(600, 153_600),
        "known": ALL,
    }
    return Space(**{**given, **changes})


def values_of(space: Space) -> dict[str, tuple[Any, ...]]:
    return {knob.name: knob.values for knob in find_knobs(space).all}


def test_a_ladder_stands_around_the_default() -> None:
    assert values_of(a_space())["max_num_seqs"] == (256, 64, 512, 32)
    assert values_of(a_space())["max_num_batched_tokens"] == (1024, 256, 2048, 128)


def test_sequences_above_the_number_of_requests_are_the_same_as_it() -> None:
    assert values_of(a_space(demand=Demand(200, 51_200)))["max_num_seqs"] == (256, 64, 32)
    assert values_of(a_space(demand=Demand(48, 768)))["max_num_seqs"] == (24, 12)


def test_a_server_has_no_number_of_requests() -> None:
    assert 512 in values_of(a_space(demand=Demand(48, 768), serves=True))["max_num_seqs"]


def test_tokens_above_those_of_all_prompts_are_left_out() -> None:
    assert values_of(a_space(demand=Demand(400, 800)))["max_num_batched_tokens"] == (1024, 256, 128)


def test_switches_have_the_other_value() -> None:
    found = values_of(a_space())
    assert found["enable_prefix_caching"] == (False,)
    assert found["capacity_policy"] == ("guaranteed_no_evict",)


def test_a_setting_that_the_engine_does_not_have_is_no_knob() -> None:
    assert set(values_of(a_space(known=["max_num_seqs"]))) == {"max_num_seqs"}


def test_a_setting_that_the_user_has_fixed_is_no_knob() -> None:
    assert "max_num_seqs" not in values_of(a_space(fixed={"max_num_seqs"}))


def test_threads_are_for_a_cpu_and_memory_for_a_gpu() -> None:
    in_force = {**DEFAULTS, "num_threads": 4, "gpu_memory_utilization": 0.92}
    on_cpu = values_of(a_space(in_force=in_force))
    assert on_cpu["num_threads"] == (2, 3)
    assert "gpu_memory_utilization" not in on_cpu
    on_gpu = values_of(a_space(in_force=in_force, is_gpu=True, num_gpus=1))
    assert on_gpu["gpu_memory_utilization"] == (0.95,)
    assert "num_threads" not in on_gpu


def test_fewer_bits_are_searched_on_a_cpu_if_quality_may_change() -> None:
    assert not {"quantization", "kv_cache_dtype"} & find_knobs(a_space()).by_name.keys()
    found = find_knobs(a_space(allows_quality_change=True)).by_name
    assert found["quantization"].values == ("int8", "int4")
    assert found["kv_cache_dtype"].values == ("fp8",)
    assert found["kv_cache_dtype"].changes_quality


def test_precision_is_searched_only_if_quality_may_change() -> None:
    in_force = {**DEFAULTS, "kv_cache_dtype": "auto", "quantization": None}
    assert "quantization" not in values_of(a_space(in_force=in_force, is_gpu=True))
    found = find_knobs(a_space(in_force=in_force, is_gpu=True, allows_quality_change=True))
    assert found.by_name["quantization"].values == ("fp8", "int4")
    assert found.by_name["kv_cache_dtype"].changes_quality


def test_the_batching_delay_is_a_knob_of_headraces_server() -> None:
    in_force = {**DEFAULTS, "max_queue_delay_us": 0}
    assert "max_queue_delay_us" in values_of(a_space(in_force=in_force, serves=True))
    assert "max_queue_delay_us" not in values_of(a_space(in_force=in_force))


def test_vllm_has_knobs_of_its_own() -> None:
    known = [*ALL, "performance_mode", "speculative_config", "tensor_parallel_size"]
    in_force = {**DEFAULTS, "performance_mode": "balanced", "tensor_parallel_size": 1}
    found = find_knobs(a_space(engine="vllm", known=known, in_force=in_force, is_gpu=True, num_gpus=4))
    assert found.by_name["performance_mode"].values == ("throughput",)
    assert found.by_name["tensor_parallel_size"].values == (2, 4)
    assert found.by_name["speculative_config"].values[0]["method"] == "ngram"
    assert all(knob.needs_restart for knob in found.all)


def test_given_values_replace_the_ladder_and_other_knobs() -> None:
    found = find_knobs(a_space(searched={"max_num_seqs": [16, 128, 8], "scheduling_policy": ["priority"]}))
    assert {knob.name: knob.values for knob in found.all} == {
        "max_num_seqs": (16, 8),
        "scheduling_policy": ("priority",),
    }
    assert found.by_name["max_num_seqs"].grows_memory


def test_combinations_that_the_engine_refuses_are_known() -> None:
    knobs = find_knobs(a_space())
    assert knobs.problem({"max_num_seqs": 512, "max_num_batched_tokens": 256}) is not None
    assert knobs.problem({"enable_chunked_prefill": False, "max_num_batched_tokens": 1024}) is not None
    assert knobs.problem({"max_num_seqs": 512, "max_num_batched_tokens": 1024}) is None


def test_configs_between_which_an_engine_can_change_have_the_same_key() -> None:
    knobs = find_knobs(a_space())
    assert knobs.restart_key({"max_num_seqs": 64}) == knobs.restart_key({})
    assert knobs.restart_key({"block_size": 32}) != knobs.restart_key({})


def test_values_that_are_no_numbers_have_no_order() -> None:
    assert not Knob("capacity_policy", ("a",), "b").is_ladder
    assert not Knob("enable_prefix_caching", (False,), True).is_ladder
    assert Knob("block_size", (8, 32), 16).ladder == [8, 16, 32]


def test_demand_is_what_the_workload_asks_for() -> None:
    assert Demand.of(workload(40, input_len=8)) == Demand(40, 320)
