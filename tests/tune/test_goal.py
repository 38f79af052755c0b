from __future__ import annotations

from typing import Any

import pytest

from headrace.bench.load.null_server import Behaviour, null_server
from headrace.bench.slo import Slo
from headrace.tune.goal import BatchGoal, Measurement, ServeGoal, SloMissedError, search_level
from tests.bench.engines_for_tests import FakeRunning
from tests.tune.builders import SimulatedEngine, workload
from tests.tune.surfaces import flat


def visited(limit: int, start: int, maximum: int = 1024) -> tuple[list[int], int]:
    """Levels in the order of the search, and the highest that is met."""
    levels: list[int] = []

    def is_met(level: int) -> bool:
        if level not in levels:
            levels.append(level)
        return level <= limit

    search_level(is_met, start=start, maximum=maximum)
    return levels, max((level for level in levels if level <= limit), default=0)


def test_the_level_of_others_is_probed_first_and_doubled() -> None:
    assert visited(100, start=16) == ([16, 32, 64, 128, 96], 96)


def test_a_level_that_is_missed_is_halved() -> None:
    assert visited(5, start=32) == ([32, 16, 8, 4, 6], 4)


def test_one_at_a_time_is_the_lowest_level() -> None:
    assert visited(0, start=4) == ([4, 2, 1], 0)


def test_the_highest_level_is_a_limit() -> None:
    assert visited(1000, start=16, maximum=48) == ([16, 32, 48], 48)


@pytest.mark.parametrize("limit", [1, 3, 20, 300])
def test_what_is_found_is_at_least_two_thirds_of_the_limit(limit: int) -> None:
    for start in (1, 8, 64, 512):
        assert visited(limit, start=start)[1] >= limit * 2 / 3 - 1


def test_a_batch_is_measured_whole_with_its_slow_end() -> None:
    with SimulatedEngine(flat, noise=0.0).start({}, serves=False) as running:
        found = BatchGoal().measure(running, workload(), None)
    assert found.value == pytest.approx(10_000.0)
    assert found.num_requests == 600
    assert found.figures["output_tokens_per_s"] == found.value


def served(behaviour: Behaviour | None = None) -> Measurement:
    goal = ServeGoal(Slo.parse("e2e:p95<60s;success>=0.9"), max_concurrency=12)
    with null_server(behaviour) as server:
        return goal.measure(FakeRunning(lambda _: 1.0, address=server.address), workload(60, 4, 4), 4)


def test_a_server_is_measured_at_the_highest_load_that_meets_the_slo() -> None:
    found = served()
    assert found.levels is not None
    assert [level["load"]["concurrency"] for level in found.levels][:2] in ([4, 8], [4, 6])
    assert found.value > 0 and found.level in (4, 6, 8, 10, 12)
    assert found.load is not None and found.load["concurrency"] == found.level
    assert found.num_requests >= 32 * len(found.levels)


def test_a_load_that_only_makes_a_server_queue_is_not_raised() -> None:
    """The goodput is the same at every level."""
    asked: list[int] = []

    class Full(ServeGoal):
        def _level(self, engine: Any, workload: Any, concurrency: int, *, is_first: bool) -> dict[str, Any]:
            asked.append(concurrency)
            conditions = [{"condition": "e2e:p95<60s", "share": 1.0, "verdict": "met"}]
            slo = {"verdict": "met", "conditions": conditions, "goodput_requests_per_s": 100.0}
            return {"load": {"concurrency": concurrency}, "summary": {"slo": slo, "num_requests": 32}}

    found = Full(Slo.parse("e2e:p95<60s")).measure(FakeRunning(lambda _: 1.0), workload(60, 4, 4), 8)
    assert asked == [8, 16, 12]
    assert found.level == 8 and found.value == 100.0


def test_a_server_that_meets_no_slo_says_which() -> None:
    with pytest.raises(SloMissedError, match=r"with 1 concurrent: .*success>=0.9 by 0.0%"):
        served(Behaviour(refused_share=1.0))


@pytest.mark.parametrize(
    ("seconds", "num_requests", "longer"),
    [
        (0.5, 10_000, 96 * 4),  # four times as many take two seconds
        (0.5, 200, 200),  # no more than the workload has: a prompt that comes again is cached
        (0.5, 100, None),
        (1.9, 10_000, None),
        (8.0, 10_000, None),
        (0.0, 10_000, None),
    ],
)
def test_a_level_that_is_over_at_once_is_measured_again_with_more_requests(
    seconds: float, num_requests: int, longer: int | None
) -> None:
    asked: list[int] = []

    class Timed(ServeGoal):
        def _run(self, engine: Any, workload: Any, load: Any, *, warms_up: bool) -> dict[str, Any]:
            asked.append(load.num_requests)
            return {"summary": {"seconds": seconds}}

    Timed(Slo.parse("e2e:p95<60s"))._level(FakeRunning(lambda _: 1.0), workload(num_requests, 4, 4), 32, is_first=True)
    assert asked == [96] + ([] if longer is None else [longer])
