"""Layouts over several GPUs, and their reasons."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.errors import ConfigError
from headrace.plan.gpus import find_gpu
from headrace.plan.layout import Layout, divides, layouts
from headrace.plan.memory import fit
from headrace.plan.precision import read_precision
from headrace.plan.prediction import Prediction, predict
from headrace.plan.settings import PlanSettings
from headrace.plan.source import find_shape
from headrace.plan.workload import named, uniform

SHORT = uniform(200, 100, num_requests=200)


def test_every_layout_uses_all_gpus_and_divides_the_heads() -> None:
    shape = find_shape("qwen2.5-14b")  # 40 query heads, 8 key-value heads
    found = layouts(shape, find_gpu("H100"), PlanSettings(num_gpus=8))
    assert all(each.num_gpus == 8 and divides(shape, each.tensor) for each in found)
    assert Layout(8, 1, 1) in found and Layout(1, 8, 1) in found


def test_stages_are_for_several_nodes_and_slow_links() -> None:
    shape = find_shape("llama-3.1-405b")
    nvlink = layouts(shape, find_gpu("H100"), PlanSettings(num_gpus=8))
    assert all(each.pipeline == 1 for each in nvlink)
    assert any(each.pipeline > 1 for each in layouts(shape, find_gpu("L40S"), PlanSettings(num_gpus=8)))
    nodes = layouts(shape, find_gpu("H100"), PlanSettings(num_gpus=16))
    assert all(each.tensor <= 8 for each in nodes)
    assert Layout(1, 8, 2) in nodes


def test_a_model_that_fits_on_one_gpu_gets_replicas() -> None:
    found = predict("llama-3.2-1b", "H100", named("chat"), PlanSettings(num_gpus=4))
    assert found.layout == Layout(4, 1, 1)
    assert "fits on one GPU" in found.layout_reason
    assert any("4 engines" in note for note in found.notes)


def test_a_model_that_needs_a_node_gets_tensor_parallelism_with_the_reason() -> None:
    found = predict("llama-3.1-405b", "H200", named("chat"), PlanSettings(num_gpus=8))
    assert found.layout == Layout(1, 8, 1)
    assert "NVLink" in found.layout_reason and "heads divide by 8" in found.layout_reason
    assert any("tensor parallel 8: the speed" in note and "not been measured" in note for note in found.notes)


def test_two_nodes_get_a_pipeline_across_them() -> None:
    found = predict("llama-3.1-405b", "H100", named("chat"), PlanSettings(num_gpus=16))
    assert found.layout == Layout(1, 8, 2)
    assert "across nodes" in found.layout_reason


def test_sizes_that_are_set_are_kept() -> None:
    found = predict("llama-3.1-8b", "H100", SHORT, PlanSettings(num_gpus=4, tensor_parallel_size=2))
    assert (found.layout.tensor, found.layout.replicas) == (2, 2)
    assert found.layout_reason == "as set"


def test_sizes_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"28 query and 4 key-value heads allow tensor parallel sizes 1, 2, 4"):
        predict("qwen2.5-7b", "H100", SHORT, PlanSettings(num_gpus=8, tensor_parallel_size=8))


def test_whole_experts_are_predicted_with_their_memory_and_the_fullest_rank() -> None:
    def made(**settings: bool) -> Prediction:
        return predict("qwen3-30b-a3b", "H100", SHORT, PlanSettings(num_gpus=8, tensor_parallel_size=4, **settings))

    sliced, whole = made(), made(enable_expert_parallel=True)
    assert (sliced.layout, whole.layout) == (Layout(2, 4, 1), Layout(2, 4, 1, True))
    assert "with whole experts" in whole.layout.label and "EP" in whole.layout.short
    assert whole.memory.weights == pytest.approx(sliced.memory.weights, rel=1e-6)  # 128 experts divide by 4
    assert sliced.speed is not None and whole.speed is not None
    assert sliced.speed.seconds < whole.speed.seconds < 4 * sliced.speed.seconds


def test_whole_experts_that_do_not_divide_evenly_need_more_memory_on_one_rank() -> None:
    settings = PlanSettings(num_gpus=3, tensor_parallel_size=3, enable_expert_parallel=True)
    shape = replace(find_shape("qwen3-30b-a3b"), num_heads=24, num_kv_heads=3)
    whole = fit(shape, find_gpu("H100"), read_precision(None, "auto", find_gpu("H100")), settings, tensor=3)
    sliced = fit(
        shape,
        find_gpu("H100"),
        read_precision(None, "auto", find_gpu("H100")),
        replace(settings, enable_expert_parallel=False),
        tensor=3,
    )
    assert whole.memory.weights / sliced.memory.weights == pytest.approx(43 * 3 / 128, abs=0.005)


@pytest.mark.parametrize(("model", "num_gpus"), [("llama-3.1-8b", 4), ("qwen3-30b-a3b", 1)])
def test_whole_experts_need_a_mixture_and_several_gpus(model: str, num_gpus: int) -> None:
    with pytest.raises(ConfigError, match="with enable_expert_parallel: it divides the experts"):
        predict(model, "H100", SHORT, PlanSettings(num_gpus=num_gpus, enable_expert_parallel=True))
