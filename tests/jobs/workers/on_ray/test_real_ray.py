"""Jobs on real Ray clusters of several nodes on this machine (make ray-test). Actors die, nodes leave and join."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.config import EngineConfig
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from tests.jobs.workers.on_ray.fake_ray import FakeRay
from tests.jobs.workers.on_ray.scene import (
    NUM_LINES,
    WatchedCluster,
    kill_the_first_actor,
    only_lost_lines_ran_again,
    prompts,
    run_on,
)

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'headrace[ray]'")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore"),  # ray's own
]

ROOT = Path(__file__).parents[4]
WriteLines = Callable[..., Path]


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """A head without cores; each test adds its nodes, and removes those that are left."""
    with pytest.MonkeyPatch.context() as patch:
        # Workers of Ray import this package and the cores of the tests.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src")]))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def add_node(ray_cluster: Any) -> Iterator[Callable[[], Any]]:
    nodes: list[Any] = []
    # Linux ends a node with the thread that started it, and the thread of an engine ends with the engine.
    starter = ThreadPoolExecutor(1)

    def add() -> Any:
        return starter.submit(start_node).result()

    def start_node() -> Any:
        with pytest.MonkeyPatch.context() as patch:
            # Ray handles SIGTERM for each node, which only the main thread may do, and the job has its own handler.
            patch.setattr(signal, "signal", lambda number, handler: None)
            nodes.append(ray_cluster.add_node(num_cpus=1))
        return nodes[-1]

    yield add
    for node in nodes:
        if node in ray_cluster.worker_nodes:
            ray_cluster.remove_node(node)
    starter.shutdown()


@pytest.fixture
def expected(write_lines: WriteLines) -> Iterator[tuple[Path, dict[int, Any]]]:
    """The input, and its answers without Ray."""
    source = write_lines(*prompts())
    local = FakeRay("here")
    _, answers = run_on(WatchedCluster(local), source, 1)
    yield source, answers
    local.close()


def test_an_actor_is_killed_in_the_middle(add_node: Callable[[], Any], expected: tuple[Path, dict[int, Any]]) -> None:
    source, answers = expected
    add_node()
    add_node()

    report, found = run_on(cluster := WatchedCluster(ray, kill_the_first_actor), source, 2)
    assert (report.exit_code, found, report.failures.deaths) == (0, answers, {"engine": 1})
    assert only_lost_lines_ran_again(cluster, 0)


def test_a_node_joins_one_leaves_and_another_takes_its_place(
    ray_cluster: Any, add_node: Callable[[], Any], expected: tuple[Path, dict[int, Any]]
) -> None:
    source, answers = expected
    only = add_node()
    first: list[int] = []  # the worker that gets the only node

    def on_answers(cluster: WatchedCluster, number: int) -> None:
        if not first:
            first.append(number)
            add_node()
            cluster.wait_for_start(1 - number, 1)
        elif number != first[0] and cluster.started[first[0]] == 1:
            ray_cluster.remove_node(only)
            add_node()
            cluster.wait_for_start(first[0], 2)

    report, found = run_on(cluster := WatchedCluster(ray, on_answers), source, 2)
    assert (report.exit_code, found, report.failures.deaths) == (0, answers, {"engine": 1})
    assert len(found) == NUM_LINES
    assert only_lost_lines_ran_again(cluster, first[0])


@pytest.mark.embedded
def test_the_command_answers_as_on_one_machine(
    ray_cluster: Any, add_node: Callable[[], Any], write_lines: WriteLines, tmp_path: Path
) -> None:
    add_node()
    source = write_lines(*({"prompt": f"The number {number} is", "max_tokens": 4} for number in range(6)))
    output = tmp_path / "ray.jsonl"
    arguments = ["run", str(source), "-o", str(output), "--ray", ray_cluster.address, "--workers", "2", "--quiet"]
    assert main([*arguments, "--temperature", "0"]) == 0
    local = tmp_path / "local.jsonl"
    config = EngineConfig()
    run_job(JobSpec(input=str(source), output=str(local), config=config, defaults={"temperature": 0}), quiet=True)
    assert texts(output) == texts(local)


def texts(path: Path) -> dict[int, str]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["index"]: line["text"] for line in lines}
