"""Warm-up and drain are found in simulated runs with noise; runs without them stay whole."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from headrace.bench.load.loads import OpenLoop
from headrace.bench.load.null_server import Behaviour
from headrace.bench.outcomes import Outcome
from headrace.bench.steady import Window, steady_window, summarize_window
from headrace.bench.workloads import WorkloadSpec, build

Pace = Callable[[float], tuple[float, float]]  # time -> (time to the first token, time between tokens)


def answer(
    index: int, due_s: float, sent_s: float, num_tokens: int, pace: Pace, rng: random.Random, noise: float
) -> Outcome:
    def noisy(seconds: float) -> float:
        return seconds * max(0.05, rng.gauss(1.0, noise))

    now = sent_s + noisy(pace(sent_s)[0])
    chunks = [now]
    for _ in range(num_tokens - 1):
        now += noisy(pace(now)[1])
        chunks.append(now)
    return Outcome(
        index=index,
        due_s=due_s,
        sent_s=sent_s,
        end_s=now,
        first_s=chunks[0],
        num_prompt_tokens=10,
        num_output_tokens=num_tokens,
        chunk_s=chunks,
    )


def closed_loop(
    pace: Pace, *, seconds: float, clients: int = 16, num_tokens: int = 40, noise: float = 0.3, seed: int = 0
) -> list[Outcome]:
    """Clients that send until `seconds` have passed, with a server of this pace."""
    rng, outcomes = random.Random(seed), list[Outcome]()
    for _ in range(clients):
        now = 0.0
        while now < seconds:
            length = rng.randint(num_tokens // 2, num_tokens * 3 // 2)
            outcomes.append(answer(len(outcomes), now, now, length, pace, rng, noise))
            now = outcomes[-1].end_s
    return outcomes


def open_loop(rate: float, num_servers: int, seconds: float, seed: int = 0) -> list[Outcome]:
    """Poisson arrivals at a server that answers `num_servers` requests at a time, 1 s each."""
    rng, free, outcomes = random.Random(seed), [0.0] * num_servers, list[Outcome]()
    workload = build(WorkloadSpec(name="random", num_requests=1, input_len=1))
    for index, due in enumerate(OpenLoop(rate=rate, seconds=seconds, seed=seed).due_times(workload)):
        place = min(range(num_servers), key=free.__getitem__)
        begun = max(due, free[place])
        found = answer(index, due, begun, 10, steady_pace(0.1), rng, 0.1)
        found.sent_s = due  # it waits in the server
        free[place] = found.end_s
        outcomes.append(found)
    return outcomes


def steady_pace(itl_s: float) -> Pace:
    return lambda now: (itl_s, itl_s)


def warm_up_pace(warm_up_s: float, factor: float) -> Pace:
    return Behaviour(ttft_s=0.1, itl_s=0.03, warm_up_s=warm_up_s, warm_up_factor=factor).pace


def found(window: Window) -> float:
    assert window.is_steady, window.reason
    assert window.bin_s is not None
    return window.bin_s


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("factor", [1.25, 2.0, 5.0])
def test_a_warm_up_of_20_s_is_found_within_one_bin(factor: float, seed: int) -> None:
    window = steady_window(closed_loop(warm_up_pace(20.0, factor), seconds=80.0, seed=seed))
    bin_s = found(window)
    assert bin_s < 3
    assert abs(window.start_s - 20.0) <= bin_s
    assert "warm-up of" in window.reason


def test_a_warm_up_that_fades_is_left_out() -> None:
    def pace(now: float) -> tuple[float, float]:
        itl = 0.03 * (1 + 2 * 0.5 ** (now / 4))  # half as slow every 4 s
        return itl, itl

    window = steady_window(closed_loop(pace, seconds=100.0))
    found(window)
    assert 8 <= window.start_s <= 40


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_cut_where_there_is_no_warm_up(seed: int) -> None:
    window = steady_window(closed_loop(steady_pace(0.03), seconds=60.0, seed=seed))
    found(window)
    assert window.start_s == 0.0
    assert "no warm-up" in window.reason


def test_clients_in_step_are_no_warm_up() -> None:
    """Equal lengths and no noise: all clients wait for their first token at the same time, again and again."""

    def pace(now: float) -> tuple[float, float]:
        return 0.5, 0.02

    rng, outcomes = random.Random(0), list[Outcome]()
    for _ in range(8):
        now = 0.0
        while now < 60:
            outcomes.append(answer(0, now, now, 40, pace, rng, 0.0))
            now = outcomes[-1].end_s
    window = steady_window(outcomes)
    assert window.start_s <= found(window)  # the last token of a round may fall into the next bin


def test_a_pause_in_the_middle_is_no_warm_up() -> None:
    def pace(now: float) -> tuple[float, float]:
        itl = 0.3 if 30 <= now < 33 else 0.03
        return itl, itl

    window = steady_window(closed_loop(pace, seconds=80.0))
    found(window)
    assert window.start_s == 0.0


def test_the_drain_is_left_out() -> None:
    """One long answer at the end: throughput is a sixteenth for as long as the rest of the run took."""
    outcomes = closed_loop(steady_pace(0.03), seconds=40.0)
    last = max(outcome.sent_s for outcome in outcomes)
    outcomes.append(answer(999, last, last, 1000, steady_pace(0.04), random.Random(0), 0.1))
    window = steady_window(outcomes)
    bin_s = found(window)
    assert last - bin_s <= window.end_s <= last
    whole = sum(o.num_output_tokens for o in outcomes) / max(o.end_s for o in outcomes)
    steady = summarize_window(outcomes, window)["output_tokens_per_s"]
    assert steady == pytest.approx(16 / 0.03, rel=0.05)
    assert whole < 0.8 * steady


def test_a_ramp_that_never_settles_is_not_steady() -> None:
    def pace(now: float) -> tuple[float, float]:
        itl = 0.06 / (0.2 + now / 80)  # throughput grows linearly
        return itl, itl

    window = steady_window(closed_loop(pace, seconds=80.0))
    assert not window.is_steady
    assert window.reason.startswith("no steady state: throughput")


def test_a_warm_up_of_nearly_the_whole_run_is_not_steady() -> None:
    assert not steady_window(closed_loop(warm_up_pace(20.0, 3.0), seconds=23.0)).is_steady


def test_a_step_at_the_very_end_is_not_steady() -> None:
    window = steady_window(closed_loop(warm_up_pace(70.0, 3.0), seconds=80.0))
    assert not window.is_steady


def test_an_open_loop_below_capacity_is_steady() -> None:
    window = steady_window(open_loop(rate=8.0, num_servers=16, seconds=120.0))
    assert window.is_steady, window.reason


def test_an_open_loop_above_capacity_is_not_steady() -> None:
    window = steady_window(open_loop(rate=20.0, num_servers=10, seconds=120.0))
    assert not window.is_steady
    assert "faster than the server answers" in window.reason


def test_requests_sent_all_at_once_have_no_steady_state() -> None:
    rng = random.Random(0)
    outcomes = [answer(n, 0.0, 0.0, 50, steady_pace(0.03), rng, 0.2) for n in range(64)]
    window = steady_window(outcomes)
    assert not window.is_steady
    assert "sent for 0 s only" in window.reason


def test_a_run_without_answers_has_no_steady_state() -> None:
    lost = Outcome(index=0, due_s=0.0, sent_s=0.0, end_s=1.0, status="refused")
    assert steady_window([]).reason == "no steady state: no request was answered"
    assert not steady_window([lost]).is_steady


def test_rates_of_a_window_count_its_tokens_and_latencies_its_requests() -> None:
    outcomes = closed_loop(warm_up_pace(20.0, 4.0), seconds=80.0, noise=0.0)
    window = steady_window(outcomes)
    steady = summarize_window(outcomes, window)
    assert steady["tpot_ms"]["max"] == pytest.approx(30.0, rel=0.01)  # nothing of the warm-up
    assert steady["seconds"] == window.seconds
    tokens = sum(window.has(at) for outcome in outcomes for at in outcome.chunk_s)
    assert steady["output_tokens_per_s"] == pytest.approx(tokens / window.seconds)
    assert steady["num_requests"] == sum(window.has(outcome.end_s) for outcome in outcomes)


def test_a_window_of_rows_without_chunks_uses_their_ends() -> None:
    outcomes = closed_loop(warm_up_pace(20.0, 4.0), seconds=120.0, clients=64)
    for outcome in outcomes:
        outcome.chunk_s = []
    window = steady_window(outcomes)
    bin_s = found(window)
    assert 20 - bin_s <= window.start_s <= 20 + 3 * bin_s
