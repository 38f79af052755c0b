"""Layouts over several GPUs, and their reasons."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.plan.gpus import find_gpu
from headrace.plan.layout import Layout, divides, layouts
from headrace.plan.prediction import predict
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
    assert any("one GPU today" in note for note in found.notes)


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
