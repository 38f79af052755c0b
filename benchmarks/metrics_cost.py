"""The cost of metrics: per engine step, per event of a stream, per request, per scrape and per poll of the dashboard.

For comparison: one observation of prometheus_client's histogram, the cost per token of a direct implementation. Times
are CPU times of one thread, the minimum of many short rounds, so that other load on the machine matters little.

    python benchmarks/metrics_cost.py --json benchmarks/results/metrics-cost.json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import count, cycle
from pathlib import Path
from time import monotonic, thread_time
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import prometheus_client
from about import cpu_name

from headrace.engine.core import STEP_SECONDS_BOUNDS, EngineCore
from headrace.histogram import Histogram
from headrace.monitor import RequestMeter, RequestTimes, ServerMetrics
from headrace.monitor.history import INTERVAL_S
from headrace.runner.fake import FakeRunner
from headrace.sched import Scheduler, SchedulerLimits
from headrace.sched.stats import BATCH_TOKENS_BOUNDS
from headrace.sched.token_gaps import TokenGaps
from headrace.server.endpoints.dashboard import figures
from headrace.server.self_monitor import SelfMonitor
from headrace.types import Request, SamplingParams, SequenceEvent, SequenceTiming
from headrace.version import __version__

NUM_CALLS = 2_000
NUM_ROUNDS = 60
NUM_STREAMS = 512
TOKENS_PER_SECOND = (20_000, 40_000)  # of one server process
SCRAPE_INTERVAL_S = 15.0
TOKENS_PER_REQUEST = 128


@dataclass(frozen=True)
class Costs:
    steady_step_us: float  # of 512 streams: their inter-token latencies, and three histograms of the step itself
    changing_step_us: float  # the same when one stream ends and another starts
    turn_us: float  # for comparison: an iteration of the engine's loop with 512 streams and a fake runner
    prometheus_client_observe_us: float  # for comparison: one labelled Histogram of prometheus_client
    event_us: float  # RequestMeter.take of an event without times; the server skips the call for these
    request_us: float  # received, first event, last event, finished
    scrape_ms: float  # observe and render
    page_bytes: int
    sample_ms: float  # of the server's own history: read, record, evaluate every alert; once in ten seconds
    poll_ms: float  # by an open dashboard page, every two seconds

    @property
    def token_us(self) -> float:
        """The cost of its event and its share of a changing step."""
        return self.event_us + self.changing_step_us / NUM_STREAMS


def seconds_per_call(call: Callable[[], object], num_calls: int = NUM_CALLS) -> float:
    """The minimum of many rounds, minus the time of an empty loop."""
    return max(0.0, _min_round(call, num_calls) - _min_round(lambda: None, num_calls))


def _min_round(call: Callable[[], object], num_calls: int) -> float:
    rounds = []
    for _ in range(NUM_ROUNDS):
        started = thread_time()
        for _ in range(num_calls):
            call()
        rounds.append((thread_time() - started) / num_calls)
    return min(rounds)


def measure() -> Costs:
    metrics, core = ServerMetrics("model"), steady_engine()
    registry = prometheus_client.CollectorRegistry()
    theirs = prometheus_client.Histogram("gap", "gap", ["model_name", "engine"], registry=registry).labels("model", "0")
    return Costs(
        steady_step_us=1e6 * step_seconds(is_changing=False),
        changing_step_us=1e6 * step_seconds(is_changing=True),
        turn_us=1e6 * seconds_per_call(core.step, 5),
        prometheus_client_observe_us=1e6 * seconds_per_call(lambda: theirs.observe(0.012)),
        event_us=1e6 * event_seconds(metrics),
        request_us=1e6 * request_seconds(metrics),
        scrape_ms=1e3 * seconds_per_call(lambda: scrape(metrics, core), 2),
        page_bytes=len(metrics.render()[0]),
        sample_ms=1e3 * sample_seconds(),
        poll_ms=1e3 * poll_seconds(),
    )


def step_seconds(*, is_changing: bool) -> float:
    """The engine's work for metrics in a step with a token of each stream."""
    gaps, slots = TokenGaps(NUM_STREAMS), np.arange(NUM_STREAMS)
    steps = [Histogram(bounds) for bounds in (STEP_SECONDS_BOUNDS, STEP_SECONDS_BOUNDS, BATCH_TOKENS_BOUNDS)]

    def step() -> None:
        now = monotonic()
        gaps.take(slots.copy(), now)
        if is_changing:
            gaps.last_at(7)
            gaps.enter(7, None)
        for histogram in steps:
            histogram.observe(0.012)

    return seconds_per_call(step, NUM_CALLS // 10)


def steady_engine() -> EngineCore:
    limits = SchedulerLimits(
        max_num_seqs=NUM_STREAMS, max_num_batched_tokens=8192, max_model_len=4096, num_blocks=200_000
    )
    core = EngineCore(Scheduler(limits), FakeRunner(max_num_seqs=NUM_STREAMS))
    for number in range(NUM_STREAMS):
        prompt = np.full(64, number, np.int32)
        core.add(Request(f"{number}", prompt, SamplingParams(max_tokens=4_000, ignore_eos=True), watched=True))
    for _ in range(20):
        core.step()
    return core


def event_seconds(metrics: ServerMetrics) -> float:
    meter = RequestMeter(metrics, Request("one", np.arange(8, dtype=np.int32), SamplingParams()), arrived=0.0)
    event = SequenceEvent("one", 0, np.array([7], np.int32))
    return seconds_per_call(lambda: meter.take(event))


def request_seconds(metrics: ServerMetrics) -> float:
    request = Request("one", np.arange(8, dtype=np.int32), SamplingParams(max_tokens=TOKENS_PER_REQUEST))
    tokens = np.array([7], np.int32)
    first = SequenceEvent("one", 0, tokens, timing=SequenceTiming(1.2, 1.5))
    last = SequenceEvent("one", 0, tokens, "stop", timing=SequenceTiming(1.2, 1.5, 3.0))

    def meter_one() -> None:
        metrics.received(n=1, max_tokens=TOKENS_PER_REQUEST)
        meter = RequestMeter(metrics, request, arrived=1.0)
        meter.take(first)
        meter.take(last)
        meter.finish("stop", [TOKENS_PER_REQUEST])

    return seconds_per_call(meter_one, NUM_CALLS // 10)


def full_history() -> tuple[SelfMonitor, Callable[[], None]]:
    """An hour with a request in each interval, so that every baseline exists; and what adds another."""
    metrics, core, times = ServerMetrics("model"), steady_engine(), count(step=INTERVAL_S)
    refresh = partial(metrics.observe, core.stats)
    monitor = SelfMonitor(metrics, refresh, print_line=lambda line: None, clock=lambda: next(times))
    finished = RequestTimes(arrived=1.0, finished=3.0, first_token=1.5)

    def sample() -> None:
        metrics.finished(finished, "stop")
        monitor.sample()

    for _ in range(monitor.history.max_samples):
        sample()
    return monitor, sample


def sample_seconds() -> float:
    return seconds_per_call(full_history()[1], 5)


def poll_seconds() -> float:
    """One in five polls gets a sample that it does not have."""
    monitor, _ = full_history()
    services: Any = SimpleNamespace(
        instance_id="one",
        model_name="model",
        started_at=0,
        gpus=None,
        state=SimpleNamespace(refuse_reason=lambda: None),
    )
    behind = cycle((1, 0, 0, 0, 0))

    def poll() -> None:
        msgspec.json.encode(figures(services, monitor, since=monitor.history.num_recorded - next(behind)))

    return seconds_per_call(poll, 5)


def scrape(metrics: ServerMetrics, core: EngineCore) -> None:
    metrics.observe(core.stats)
    metrics.render()


def shares(costs: Costs, tokens_per_second: int) -> dict[str, float]:
    """Shares of one core at a token rate, with answers of 128 tokens and a scrape every 15 s."""
    seconds = {
        "tokens": 1e-6 * costs.token_us * tokens_per_second,
        "requests": 1e-6 * costs.request_us * tokens_per_second / TOKENS_PER_REQUEST,
        "scrapes": 1e-3 * costs.scrape_ms / SCRAPE_INTERVAL_S,
    }
    return seconds | {"all": sum(seconds.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write a record of the numbers to this file")
    parser.add_argument("--date", default=datetime.now(UTC).date().isoformat(), help="date of the record")
    args = parser.parse_args()
    costs = measure()
    by_rate = {f"{rate}": shares(costs, rate) for rate in TOKENS_PER_SECOND}
    for name, value in asdict(costs).items():
        print(f"{name:<30} {value:>12,.2f}")
    for rate, parts in by_rate.items():
        print(f"at {rate} tokens/s: " + ", ".join(f"{name} {share:.2%}" for name, share in parts.items()))
    print(f"metrics take {costs.steady_step_us / costs.turn_us:.2%} of the host's time of a steady step")
    if args.json is not None:
        record = {
            "date": args.date,
            "command": " ".join(["python", *sys.argv]),
            "versions": {
                "headrace": __version__,
                "python": platform.python_version(),
                "prometheus_client": version("prometheus-client"),
            },
            "cpu": cpu_name(),
            "costs": asdict(costs),
            "tokens_per_request": TOKENS_PER_REQUEST,
            "share_of_a_core_by_tokens_per_second": by_rate,
            "steady_step_share_of_a_turn": costs.steady_step_us / costs.turn_us,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
