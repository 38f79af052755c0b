"""The number of replicas that a load needs."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from headrace.server.route.desired import (
    HOLD_S,
    WINDOW_S,
    Demand,
    DesiredReplicas,
    Needed,
    desired_replicas,
    mean_demand,
    needed_replicas,
)


def over_time(loads: Iterable[float], *, target: float = 10.0) -> list[int]:
    """One observation a second."""
    desired = DesiredReplicas()
    return [desired.observe(float(at), load, target) for at, load in enumerate(loads)]


def test_no_replica_has_more_than_its_target() -> None:
    numbers = [needed_replicas(load, 10.0, least=1, most=5) for load in (0, 1, 10, 11, 20, 49, 50, 1_000)]
    assert numbers == [1, 1, 1, 2, 2, 5, 5, 5]


def test_the_demand_is_a_mean_over_the_window() -> None:
    demands = [Demand(0.0, 100.0), Demand(1.0, 10.0), Demand(WINDOW_S, 20.0)]
    assert mean_demand(demands, WINDOW_S) == 15.0
    assert mean_demand([], 0.0) == 0.0


def test_the_largest_need_of_the_hold_time_counts() -> None:
    needed = [Needed(0.0, 9), Needed(1.0, 4), Needed(200.0, 2)]
    assert [desired_replicas(needed, now, least=1) for now in (200.0, HOLD_S, HOLD_S + 1.0)] == [9, 4, 2]
    assert desired_replicas([], 0.0, least=3) == 3


def test_a_short_peak_is_averaged_away() -> None:
    assert max(over_time([10.0] * 20 + [40.0] + [10.0] * 20)) == 2
    assert over_time([10.0] * 20 + [10.0] * 20)[-1] == 1


def test_growth_is_followed_within_the_window() -> None:
    found = over_time([10.0] * 20 + [60.0] * 20)
    assert found[19] == 1 and found[20 + int(WINDOW_S) - 1] == 6


def test_a_fall_is_followed_after_the_hold_time() -> None:
    found = over_time([60.0] * 20 + [10.0] * 400)
    assert found[20 + int(WINDOW_S) + 200] == 6
    assert found[-1] == 1


@given(st.lists(st.floats(0, 1_000), min_size=1, max_size=700))
def test_observing_step_by_step_is_the_pure_function(loads: list[float]) -> None:
    """The observations that are dropped on the way do not matter."""
    desired = DesiredReplicas(least=2, most=50)
    demands: list[Demand] = []
    needed: list[Needed] = []
    for at, load in enumerate(loads):
        now = float(at)
        demands.append(Demand(now, load))
        needed.append(Needed(now, needed_replicas(mean_demand(demands[-20:], now), 7.0, least=2, most=50)))
        assert desired.observe(now, load, 7.0) == desired_replicas(needed, now, least=2)
