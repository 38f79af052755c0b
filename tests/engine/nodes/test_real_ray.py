"""An engine on two nodes of a real Ray cluster on this machine (make ray-test)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from tests.engine.process.process_tools import wait_until
from tests.engine.ranks.test_failures import failure_during
from tests.engine.ranks.test_ranks import GREEDY, running, tokens

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'headrace[ray]'")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore"),  # ray's own
]

ROOT = Path(__file__).parents[3]
TWO_NODES: dict[str, Any] = {"pipeline_parallel_size": 2, "nnodes": 2, "distributed_executor_backend": "ray"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        found = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        found.add_node(num_cpus=1)
        ray.init(address=found.address, log_to_driver=False, logging_level="ERROR")
        yield found
        ray.shutdown()
        found.shutdown()


def free_cpus() -> float:
    return float(ray.available_resources().get("CPU", 0.0))


def test_two_nodes_of_a_cluster_answer_as_one_process_and_give_their_places_back(
    cluster: Any, tiny_directory: Path
) -> None:
    with running(tiny_directory) as llm:
        expected = tokens(llm, GREEDY)
    with running(tiny_directory, **TWO_NODES) as llm:
        assert tokens(llm, GREEDY) == expected
        wait_until(lambda: free_cpus() == 0.0)
    wait_until(lambda: free_cpus() == 2.0)


def test_a_node_that_leaves_the_cluster_ends_the_engine(cluster: Any, tiny_directory: Path) -> None:
    with running(tiny_directory, max_model_len=512, **TWO_NODES) as llm:
        started = time.monotonic()
        message = failure_during(lambda: cluster.remove_node(next(iter(cluster.worker_nodes))), llm)
        assert "node 1" in message and time.monotonic() - started < 60
    cluster.add_node(num_cpus=1)


def test_a_cluster_without_room_is_told(cluster: Any, tiny_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.nodes.on_ray.PLACE_S", 2.0)
    with pytest.raises(ConfigError, match="did not have 3 nodes with 1 CPUs free on each"):
        with running(tiny_directory, **TWO_NODES | {"pipeline_parallel_size": 3, "nnodes": 3}):
            pass
