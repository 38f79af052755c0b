"""Jobs on a cluster whose actors are threads: the same code as on a real one, but for ray itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from headrace.errors import ConfigError
from headrace.jobs.workers.on_ray.cluster import connected
from tests.jobs.workers.on_ray.fake_ray import FakeRay
from tests.jobs.workers.on_ray.scene import (
    NUM_LINES,
    WatchedCluster,
    kill_the_first_actor,
    only_lost_lines_ran_again,
    prompts,
    recomputed,
    run_on,
)

WriteLines = Callable[..., Path]


@pytest.fixture
def fake_ray() -> Iterator[Callable[..., FakeRay]]:
    opened: list[FakeRay] = []

    def open_ray(*nodes: str) -> FakeRay:
        opened.append(FakeRay(*nodes))
        return opened[-1]

    yield open_ray
    for each in opened:
        each.close()


def test_two_actors_answer_as_one_does(write_lines: WriteLines, fake_ray: Callable[..., FakeRay]) -> None:
    source = write_lines(*prompts())
    _, expected = run_on(WatchedCluster(fake_ray("a")), source, 1)
    ray = fake_ray("a", "b")

    def on_answers(cluster: WatchedCluster, number: int) -> None:
        cluster.wait_for_start(1 - number, 1)

    report, found = run_on(cluster := WatchedCluster(ray, on_answers), source, 2)
    assert (report.exit_code, found) == (0, expected)
    assert len(found) == NUM_LINES
    assert not recomputed(cluster)
    assert sorted(number for number, ids in cluster.submitted if ids) == [0, 1]
    assert all((o["max_restarts"], o["max_task_retries"], o["num_cpus"]) == (0, 0, 1) for o in ray.options)


def test_requests_are_sent_in_batches(write_lines: WriteLines, fake_ray: Callable[..., FakeRay]) -> None:
    ray = fake_ray("a")
    run_on(WatchedCluster(ray), write_lines(*prompts()), 1)
    (actor,) = ray.actors
    sizes = [len(args[0]) for method, args in actor.calls if method == "send"]
    assert sum(sizes) >= NUM_LINES
    assert len(sizes) < NUM_LINES / 2


def test_a_killed_actor_is_replaced_and_costs_its_lines_in_flight(
    write_lines: WriteLines, fake_ray: Callable[..., FakeRay]
) -> None:
    source = write_lines(*prompts())
    _, expected = run_on(WatchedCluster(fake_ray("a")), source, 1)
    ray = fake_ray("a", "b")

    report, found = run_on(cluster := WatchedCluster(ray, kill_the_first_actor), source, 2)
    assert (report.exit_code, found, report.failures.deaths) == (0, expected, {"engine": 1})
    assert only_lost_lines_ran_again(cluster, 0)


def test_a_node_joins_one_leaves_and_another_takes_its_place(
    write_lines: WriteLines, fake_ray: Callable[..., FakeRay]
) -> None:
    source = write_lines(*prompts())
    _, expected = run_on(WatchedCluster(fake_ray("a")), source, 1)
    ray = fake_ray("a")
    first: list[int] = []  # the worker that gets the only node

    def on_answers(cluster: WatchedCluster, number: int) -> None:
        if not first:
            first.append(number)
            ray.add_node("b")
            cluster.wait_for_start(1 - number, 1)
        elif number != first[0] and cluster.started[first[0]] == 1:
            ray.remove_node("a")
            ray.add_node("c")
            cluster.wait_for_start(first[0], 2)

    report, found = run_on(cluster := WatchedCluster(ray, on_answers), source, 2)
    assert (report.exit_code, found, report.failures.deaths) == (0, expected, {"engine": 1})
    assert only_lost_lines_ran_again(cluster, first[0])


def test_a_job_goes_on_with_fewer_actors_than_it_may_have(
    write_lines: WriteLines, fake_ray: Callable[..., FakeRay]
) -> None:
    cluster = WatchedCluster(fake_ray("a"))
    report, found = run_on(cluster, write_lines(*prompts()), 3)
    assert (report.exit_code, len(found)) == (0, NUM_LINES)
    assert sum(bool(ids) for _, ids in cluster.submitted) == 1  # another may start when the first one has ended
    assert "starting" in [worker.state for worker in report.workers]


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'headrace\[ray\]'"), connected("auto"):
        pass


@pytest.mark.parametrize(
    "address, message",
    [
        ("ray://head:10001", "give HOST:PORT"),
        ("head", "give HOST:PORT"),
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"),
    ],
)
def test_an_address_without_a_cluster_is_refused_at_once(
    address: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = ModuleType("ray")  # without `init`
    ray.is_initialized = lambda: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(ConfigError, match=message), connected(address):
        pass
