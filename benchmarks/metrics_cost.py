"""What metrics cost a server: by token, by request, by engine step and by scrape.

Beside them, prometheus_client's own histogram, which the hot path does without. Times are CPU time of one thread, the
least of several rounds, so that what else the machine does counts little.

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
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from time import thread_time

import numpy as np
import prometheus_client

from headrace.engine.core import STEP_SECONDS_BOUNDS, EngineCore
from headrace.histogram import Histogram
from headrace.monitor import RequestMeter, RequestTimes, ServerMetrics
from headrace.runner.fake import FakeRunner
from headrace.sched import Scheduler, SchedulerLimits
from headrace.types import Request, SamplingParams, SequenceEvent
from headrace.version import __version__

NUM_CALLS = 100_000
NUM_ROUNDS = 7
NUM_STREAMS = 512
TOKENS_PER_SECOND = (20_000, 40_000)  # of one server process
SCRAPE_INTERVAL_S = 15.0
GAPS = [0.004, 0.012, 0.02, 0.3]


@dataclass(frozen=True)
class Costs:
    token_ns: float  # ServerMetrics.tokens
    stream_event_ns: float  # RequestMeter.take, which calls it
    prometheus_client_observe_ns: float  # one labelled Histogram of prometheus_client, for comparison
    request_us: float  # received and finished
    step_us: float  # the three histograms that the engine counts a step in
    steady_turn_us: float  # a turn of the engine's loop with 512 streams and a runner that computes nothing
    scrape_ms: float  # observe and render
    page_bytes: int


def seconds_a_call(call: Callable[[], object], num_calls: int = NUM_CALLS) -> float:
    """The least of several rounds, less what an empty loop takes."""
    return max(0.0, _least_round(call, num_calls) - _least_round(lambda: None, num_calls))


def _least_round(call: Callable[[], object], num_calls: int) -> float:
    rounds = []
    for _ in range(NUM_ROUNDS):
        started = thread_time()
        for _ in range(num_calls):
            call()
        rounds.append((thread_time() - started) / num_calls)
    return min(rounds)


def measure() -> Costs:
    metrics = ServerMetrics("model")
    gaps = cycle(GAPS)
    next_gap = seconds_a_call(lambda: next(gaps))
    labels = ["model_name", "engine"]
    registry = prometheus_client.CollectorRegistry()
    theirs = prometheus_client.Histogram("gap", "gap", labels, registry=registry).labels("model", "0")
    steps = [Histogram(STEP_SECONDS_BOUNDS) for _ in range(3)]
    core = steady_engine()
    return Costs(
        token_ns=1e9 * (seconds_a_call(lambda: metrics.tokens(1, next(gaps))) - next_gap),
        stream_event_ns=1e9 * stream_event_seconds(metrics),
        prometheus_client_observe_ns=1e9 * (seconds_a_call(lambda: theirs.observe(next(gaps))) - next_gap),
        request_us=1e6 * seconds_a_call(lambda: count_request(metrics), NUM_CALLS // 10),
        step_us=1e6 * seconds_a_call(lambda: [histogram.observe(0.012) for histogram in steps]),
        steady_turn_us=1e6 * seconds_a_call(core.step, 200),
        scrape_ms=1e3 * seconds_a_call(lambda: scrape(metrics, core), 10),
        page_bytes=len(metrics.render()[0]),
    )


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


def stream_event_seconds(metrics: ServerMetrics) -> float:
    """One token of a stream, the look at the clock included."""
    request = Request("one", np.arange(8, dtype=np.int32), SamplingParams())
    meter = RequestMeter(metrics, request, arrived=0.0)
    event = SequenceEvent("one", 0, np.array([7], np.int32))
    return seconds_a_call(lambda: meter.take(event))


def count_request(metrics: ServerMetrics) -> None:
    metrics.received(n=1, max_tokens=64)
    metrics.finished(
        RequestTimes(
            arrived=1.0,
            queued_until=1.2,
            first_token=1.5,
            last_token=3.0,
            finished=3.0,
            num_prompt=200,
            num_generated=64,
            max_tokens=64,
        ),
        "stop",
    )


def scrape(metrics: ServerMetrics, core: EngineCore) -> None:
    metrics.observe(core.stats)
    metrics.render()


def shares(costs: Costs, tokens_per_second: int) -> dict[str, float]:
    """Of one core's time, at a rate of tokens, with answers of 64 tokens and a scrape every 15 s."""
    seconds = {
        "tokens": 1e-9 * costs.stream_event_ns * tokens_per_second,
        "requests": 1e-6 * costs.request_us * tokens_per_second / 64,
        "scrapes": 1e-3 * costs.scrape_ms / SCRAPE_INTERVAL_S,
    }
    return seconds | {"all": sum(seconds.values()), "tokens() alone": 1e-9 * costs.token_ns * tokens_per_second}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write a record of the numbers to this file")
    parser.add_argument("--date", default=datetime.now(UTC).date().isoformat(), help="date of the record")
    args = parser.parse_args()
    costs = measure()
    by_rate = {f"{rate}": shares(costs, rate) for rate in TOKENS_PER_SECOND}
    step_share = costs.step_us / costs.steady_turn_us
    for name, value in asdict(costs).items():
        print(f"{name:<30} {value:>12,.2f}")
    for rate, parts in by_rate.items():
        print(f"at {rate} tokens/s: " + ", ".join(f"{name} {share:.2%}" for name, share in parts.items()))
    print(f"of the host's part of a step with {NUM_STREAMS} streams: {step_share:.2%}")
    if args.json is not None:
        record = {
            "date": args.date,
            "command": " ".join(["python", *sys.argv]),
            "versions": {
                "headrace": __version__,
                "python": platform.python_version(),
                "prometheus_client": version("prometheus-client"),
            },
            "cpu": cpu_model(),
            "costs": asdict(costs),
            "share_of_a_core_by_tokens_per_second": by_rate,
            "share_of_a_steady_turn": step_share,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=2) + "\n")


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
