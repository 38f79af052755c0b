"""The host's cost per step: plan and apply with a fake runner that computes nothing.

Two figures: an iteration of the engine's loop with 1,000 decoding sequences (with and without 10,000 more waiting), and
a chat workload from first to last token. On a busy machine use the CPU time: it excludes the time of other processes.

    python benchmarks/engine_overhead.py --json benchmarks/results/engine-overhead.json
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
from about import cpu_name

from headrace.engine.core import EngineCore
from headrace.runner.fake import FakeRunner
from headrace.sched import Scheduler, SchedulerLimits
from headrace.steps import StepPlan, StepResult
from headrace.types import Request, SamplingParams
from headrace.version import __version__

NUM_RUNNING = 1_000
NUM_WARM_UP_TURNS = 40  # until every prompt is computed and sequences are at different positions of their blocks
LIMITS = SchedulerLimits(max_num_seqs=NUM_RUNNING, max_num_batched_tokens=8192, max_model_len=4096, num_blocks=200_000)


@dataclass(frozen=True)
class SteadyTurn:
    """One iteration of the loop: plan, submit to a fake runner, collect, apply."""

    num_running: int
    num_waiting: int
    num_turns: int
    wall_us_median: float
    wall_us_p99: float
    cpu_us_mean: float
    fake_runner_cpu_us_mean: float  # the part of the fake runner


@dataclass(frozen=True)
class Workload:
    num_requests: int
    num_tokens_out: int
    num_steps: int
    wall_seconds: float
    cpu_seconds: float
    host_us_per_step: float
    host_us_per_request: float
    kv_waste: float
    num_preemptions: int


class TimedRunner(FakeRunner):
    """A fake runner that measures its own CPU time."""

    cpu_seconds = 0.0

    def submit(self, plan: StepPlan) -> StepResult:
        started = process_time()
        result = super().submit(plan)
        self.cpu_seconds += process_time() - started
        return result


def measure_steady_turns(num_waiting: int, num_turns: int) -> SteadyTurn:
    runner = TimedRunner(max_num_seqs=NUM_RUNNING)
    core = EngineCore(Scheduler(LIMITS), runner)
    tokens = np.random.default_rng(0)
    for number in range(NUM_RUNNING + num_waiting):
        prompt = tokens.integers(0, 100_000, 64 + number % 128).astype(np.int32)
        core.add(Request(f"{number}", prompt, SamplingParams(max_tokens=3_000, ignore_eos=True)))
    for _ in range(NUM_WARM_UP_TURNS):
        core.step()
    stats = core.stats.scheduler
    assert (stats.num_running, stats.num_waiting) == (NUM_RUNNING, num_waiting)
    runner.cpu_seconds = 0.0
    cpu_started = process_time()
    seconds = [_seconds_of_turn(core) for _ in range(num_turns)]
    return SteadyTurn(
        num_running=NUM_RUNNING,
        num_waiting=num_waiting,
        num_turns=num_turns,
        wall_us_median=1e6 * statistics.median(seconds),
        wall_us_p99=1e6 * float(np.quantile(seconds, 0.99)),
        cpu_us_mean=1e6 * (process_time() - cpu_started) / num_turns,
        fake_runner_cpu_us_mean=1e6 * runner.cpu_seconds / num_turns,
    )


def _seconds_of_turn(core: EngineCore) -> float:
    started = perf_counter()
    core.step()
    return perf_counter() - started


def chat_requests(num_requests: int) -> list[Request]:
    """Short, long-tailed prompts and answers, as in conversations."""
    rng, tokens = random.Random(0), np.random.default_rng(0)
    requests = []
    for number in range(num_requests):
        prompt_len = max(4, min(2048, int(rng.lognormvariate(4.8, 1.1))))
        answer_len = max(4, min(1024, int(rng.lognormvariate(5.0, 0.9))))
        prompt = tokens.integers(1_000, 100_000, prompt_len).astype(np.int32)
        requests.append(Request(f"{number}", prompt, SamplingParams(max_tokens=answer_len, ignore_eos=True)))
    return requests


def measure_chat(num_requests: int) -> Workload:
    core = EngineCore(Scheduler(LIMITS), FakeRunner(max_num_seqs=NUM_RUNNING))
    requests = chat_requests(num_requests)
    started, cpu_started = perf_counter(), process_time()
    for request in requests:
        core.add(request)
    while core.has_work:
        core.step()
    wall_seconds, cpu_seconds = perf_counter() - started, process_time() - cpu_started
    stats = core.stats
    assert stats.scheduler.num_finished == num_requests
    return Workload(
        num_requests=num_requests,
        num_tokens_out=stats.scheduler.num_generated_tokens,
        num_steps=stats.scheduler.num_steps,
        wall_seconds=wall_seconds,
        cpu_seconds=cpu_seconds,
        host_us_per_step=1e6 * cpu_seconds / stats.scheduler.num_steps,
        host_us_per_request=1e6 * cpu_seconds / num_requests,
        kv_waste=stats.scheduler.kv_waste,
        num_preemptions=stats.scheduler.num_preemptions,
    )


def show(turns: list[SteadyTurn], chat: Workload) -> None:
    print(f"{'running':>8} {'waiting':>8} {'turn, median':>14} {'p99':>10} {'cpu':>10} {'of it fake':>11}")
    for turn in turns:
        print(
            f"{turn.num_running:>8,} {turn.num_waiting:>8,} {turn.wall_us_median:>11.0f} µs {turn.wall_us_p99:>7.0f} µs"
            f" {turn.cpu_us_mean:>7.0f} µs {turn.fake_runner_cpu_us_mean:>8.0f} µs"
        )
    print(
        f"chat, {chat.num_requests:,} requests: {chat.num_tokens_out:,} tokens in {chat.num_steps:,} steps, "
        f"{chat.cpu_seconds:.2f} s of CPU: {chat.host_us_per_step:.0f} µs per step, "
        f"{chat.host_us_per_request:.0f} µs per request; "
        f"KV waste {chat.kv_waste:.2%}, {chat.num_preemptions:,} preemptions"
    )


def write_record(path: Path, date: str, turns: list[SteadyTurn], chat: Workload) -> None:
    record = {
        "date": date,
        "command": " ".join(["python", *sys.argv]),
        "versions": {"headrace": __version__, "python": platform.python_version(), "numpy": np.__version__},
        "cpu": cpu_name(),
        "steady_turns": [asdict(turn) for turn in turns],
        "chat": asdict(chat),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=500, help="loop iterations to measure")
    parser.add_argument("--requests", type=int, default=2_000, help="requests of the chat workload")
    parser.add_argument("--json", type=Path, help="write a record of the numbers to this file")
    parser.add_argument("--date", default=datetime.now(UTC).date().isoformat(), help="date of the record")
    args = parser.parse_args()
    turns = [measure_steady_turns(num_waiting, args.turns) for num_waiting in (0, 10_000)]
    chat = measure_chat(args.requests)
    show(turns, chat)
    if args.json is not None:
        write_record(args.json, args.date, turns, chat)


if __name__ == "__main__":
    main()
