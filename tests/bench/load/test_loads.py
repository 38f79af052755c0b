"""When requests are due, and how loads are parsed and written."""

from __future__ import annotations

import json
import math
import statistics
from itertools import pairwise

import pytest

from headrace.bench.load.loads import ClosedLoop, Load, OpenLoop, Trace, load_from_json, parse_load
from headrace.bench.workloads import BenchRequest, Workload, WorkloadSpec, build
from headrace.errors import ConfigError

WORKLOAD = build(WorkloadSpec(name="random", num_requests=20, input_len=4, output_len=2))


def traced(*due_s: float | None) -> Workload:
    return Workload(WORKLOAD.spec, [BenchRequest(prompt="x", output_len=1, due_s=due) for due in due_s])


@pytest.mark.parametrize(
    "load",
    [
        ClosedLoop(concurrency=4),
        ClosedLoop(concurrency=4, num_requests=9, seconds=2.5),
        OpenLoop(rate=3.5, burstiness=math.inf, max_concurrency=7, seed=2),
        OpenLoop(rate=math.inf, num_requests=5),
        Trace(speed=2.0),
    ],
)
def test_a_load_survives_its_json_form(load: Load) -> None:
    assert load_from_json(json.loads(json.dumps(load.as_json(), allow_nan=False))) == load


def test_a_load_without_a_limit_sends_the_workload_once() -> None:
    assert ClosedLoop(concurrency=3).count(WORKLOAD) == 20
    assert ClosedLoop(concurrency=3, seconds=5).count(WORKLOAD) is None
    assert len(OpenLoop(rate=5).due_times(WORKLOAD)) == 20


def test_constant_arrivals_are_evenly_spaced() -> None:
    due = OpenLoop(rate=4, burstiness=math.inf, num_requests=5).due_times(WORKLOAD)
    assert due == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_an_infinite_rate_sends_everything_at_once() -> None:
    assert OpenLoop(rate=math.inf, num_requests=3).due_times(WORKLOAD) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_spread_of_their_gamma_distribution(burstiness: float) -> None:
    due = OpenLoop(rate=10, burstiness=burstiness, num_requests=20_001).due_times(WORKLOAD)
    gaps = [later - earlier for earlier, later in pairwise(due)]
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_equal_seeds_make_equal_arrivals() -> None:
    assert OpenLoop(rate=3, seed=5).due_times(WORKLOAD) == OpenLoop(rate=3, seed=5).due_times(WORKLOAD)
    assert OpenLoop(rate=3, seed=5).due_times(WORKLOAD) != OpenLoop(rate=3, seed=6).due_times(WORKLOAD)


def test_seconds_end_the_arrivals_of_an_open_loop() -> None:
    due = OpenLoop(rate=50, seconds=3).due_times(WORKLOAD)
    assert 100 < len(due) < 200
    assert due[-1] < 3


def test_a_trace_begins_at_once_and_may_run_faster() -> None:
    assert Trace(speed=2).due_times(traced(10.0, 11.0, 14.0)) == [0.0, 0.5, 2.0]


def test_a_trace_needs_arrival_times() -> None:
    with pytest.raises(ConfigError, match="1 of 2 requests"):
        Trace().due_times(traced(1.0, None))


def test_the_kind_follows_from_the_values() -> None:
    assert parse_load({"concurrency": "8", "seconds": "2.5", "rate": None}) == ClosedLoop(concurrency=8, seconds=2.5)
    assert parse_load({"rate": "inf", "num_requests": 4}) == OpenLoop(rate=math.inf, num_requests=4)
    assert parse_load({"rate": 2, "burstiness": "inf"}) == OpenLoop(rate=2.0, burstiness=math.inf)
    assert parse_load({"speed": "1"}) == Trace()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "one of concurrency, rate, speed, got none"),
        ({"concurrency": 1, "rate": 2}, "got concurrency and rate"),
        ({"concurrency": 1, "burstiness": 2}, "burstiness does not go with concurrency"),
        ({"concurrency": "many"}, "concurrency of a load must be a whole number, got 'many'"),
        ({"concurrency": 2.5}, "must be a whole number, got 2.5"),
        ({"concurrency": 0}, "concurrency of a load must be above 0, got 0"),
        ({"concurrency": True}, "must be a whole number, got True"),
        ({"rate": "-1"}, "rate of a load must be above 0"),
        ({"rate": "nan"}, "rate of a load must be above 0"),
        ({"rate": 1, "seconds": 0}, "seconds of a load must be above 0"),
        ({"rate": "inf", "seconds": 3}, "needs a number of requests"),
        ({"rate": 1, "max_concurency": 3}, "did you mean 'max_concurrency'"),
        ({"speed": "inf"}, "speed of the load must be finite"),
    ],
)
def test_impossible_values_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_load(values)
