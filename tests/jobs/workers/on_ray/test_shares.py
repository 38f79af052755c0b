"""How many actors a cluster holds, and what each gets of its node."""

from __future__ import annotations

import pytest

from headrace.config import EngineConfig
from headrace.jobs.workers.on_ray.shares import Node, plan_actors


@pytest.mark.parametrize(
    "nodes, num_workers, expected",
    [
        ([8, 8], 2, (2, 8)),
        ([8, 8], 4, (4, 4)),
        ([8, 4], 3, (3, 4)),
        ([8, 4], None, (3, 4)),
        ([2], 5, (5, 1)),
        ([], 3, (3, 1)),
        ([], None, (1, 1)),
    ],
)
def test_cores_are_divided_so_that_all_workers_find_a_place(
    nodes: list[int], num_workers: int | None, expected: tuple[int, int]
) -> None:
    plan = plan_actors(EngineConfig(), [Node(cores, 0) for cores in nodes], num_workers)
    assert (plan.num_workers, plan.num_cpus, plan.num_gpus) == (*expected, 0)
    assert plan.share.config.num_threads == expected[1]


def test_actors_on_one_node_divide_its_memory() -> None:
    plan = plan_actors(EngineConfig(gpu_memory_utilization=0.6), [Node(8, 0), Node(4, 0)], 3)
    assert plan.share.num_sharing == 2
    assert plan.share.config.gpu_memory_utilization == pytest.approx(0.3)
    assert "up to 2 actors on a node divide 60%" in plan.share.reasons["num_blocks"]


def test_threads_and_sizes_of_the_user_are_those_of_each_actor() -> None:
    config = EngineConfig(num_threads=2, kv_cache_memory_bytes=1 << 20)
    plan = plan_actors(config, [Node(8, 0)], None)
    assert (plan.num_workers, plan.num_cpus, plan.share.config) == (4, 2, config)


def test_an_actor_has_one_gpu_and_the_memory_of_all_of_it() -> None:
    plan = plan_actors(EngineConfig(), [Node(16, 4), Node(64, 8), Node(128, 0)], None)
    assert (plan.num_workers, plan.num_cpus, plan.num_gpus) == (12, 0, 1)
    assert (plan.share.config.num_threads, plan.share.config.gpu_memory_utilization) == (4, None)


def test_a_job_on_the_cpu_leaves_gpus_alone() -> None:
    plan = plan_actors(EngineConfig(device="cpu"), [Node(16, 4)], None)
    assert (plan.num_workers, plan.num_cpus, plan.num_gpus) == (1, 16, 0)
