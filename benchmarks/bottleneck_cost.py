"""The time that the server's watch of its bottleneck takes on the event loop: per second, and per slice of a diagnosis.

The evidence is that of a busy server with an 8B model on a GPU that plan knows, where rules compute the most. Times are
CPU times of one thread.

    python benchmarks/bottleneck_cost.py --json benchmarks/results/bottleneck-cost.json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import thread_time

from about import commit, cpu_name

from headrace.engine.core import EngineStats
from headrace.engine.fake_settings import fake_settings
from headrace.histogram import Histogram
from headrace.monitor import RequestTimes, ServerMetrics
from headrace.plan.gpus import find_gpu
from headrace.plan.source import find_shape
from headrace.sched import SchedulerStats
from headrace.sched.stats import BATCH_TOKENS_BOUNDS, TOKEN_GAP_BOUNDS
from headrace.server.bottleneck import SNAPSHOT_S, BottleneckWatch

NUM_SECONDS = 2_000
TIMES = RequestTimes(
    arrived=0.0, queued_until=0.1, first_token=0.3, last_token=2.0, finished=2.0, num_prompt=500, num_generated=100
)


class BusyServer:
    """Counts a second of work at a time: 2,000 tokens generated, 3,000 of prompts, 20 requests."""

    def __init__(self) -> None:
        settings = fake_settings(
            device="cuda", max_num_seqs=256, max_num_batched_tokens=8192, num_blocks=20_000, enable_prefix_caching=True
        )
        self.metrics = ServerMetrics("llama-3.1-8b", settings, memory_share=0.92)
        self.seconds = 0
        self._gaps, self._steps = Histogram(TOKEN_GAP_BOUNDS), Histogram(BATCH_TOKENS_BOUNDS)

    def work(self) -> None:
        self.seconds += 1
        self._gaps.observe_many(0.02, 2_000)
        self._steps.observe_many(100, 50)
        for _ in range(20):
            self.metrics.finished(TIMES, "stop")

    def observe(self) -> SchedulerStats:
        scheduler = SchedulerStats(
            num_steps=50 * self.seconds,
            num_generated_tokens=2_000 * self.seconds,
            num_prompt_tokens=3_000 * self.seconds,
            num_running=200,
            num_blocks=20_000,
            num_blocks_held=12_000,
            batch_tokens=self._steps.snapshot(),
            token_gaps=self._gaps.snapshot(),
        )
        self.metrics.observe(EngineStats(scheduler, 0.1 * self.seconds, 0.9 * self.seconds, started_at=1.0))
        return scheduler


def measure() -> dict[str, float]:
    server = BusyServer()
    watch = BottleneckWatch(
        server.metrics,
        server.observe,
        model=find_shape("llama-3.1-8b"),
        gpu=find_gpu("H200"),
        clock=lambda: float(server.seconds),
    )
    ticks: list[float] = []
    diagnoses: list[list[float]] = []
    for _ in range(NUM_SECONDS):
        server.work()
        slices, steps = [], watch.slices()
        is_done = False
        while not is_done:
            started = thread_time()
            is_done = next(steps, "end") == "end"
            slices.append(1e3 * (thread_time() - started))
        if len(slices) == 1:
            ticks.append(slices[0])
        else:
            diagnoses.append(slices)
    del diagnoses[:3]  # the first ones fill caches
    longest = [max(slices) for slices in diagnoses]
    return {
        "tick_ms_median": median(ticks),
        "slice_ms_longest_median": median(longest),
        "slice_ms_longest_p99": sorted(longest)[int(0.99 * len(longest))],
        "diagnosis_ms_median": median(map(sum, diagnoses)),
        "slices": len(diagnoses[0]),
        "share_of_a_core": 1e-3 * (median(ticks) + median(map(sum, diagnoses)) / SNAPSHOT_S),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write a record of the numbers to this file")
    parser.add_argument("--date", default=datetime.now(UTC).date().isoformat(), help="date of the record")
    args = parser.parse_args()
    costs = measure()
    for name, value in costs.items():
        print(f"{name:<26} {value:>10.5f}")
    if args.json is not None:
        record = {
            "date": args.date,
            "command": " ".join(["python", *sys.argv]),
            "commit": commit(),
            "python": platform.python_version(),
            "cpu": cpu_name(),
            "costs": costs,
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
