"""The worst gap between two tokens of running answers while a long prompt arrives, by token budget.

Guides say to raise max_num_batched_tokens against such stalls, to twice the longest prompt (rule A7 of docs/doctor.md).
Here 8 streams decode with the embedded model on the CPU, and one prompt of 1,500 tokens arrives. Each budget has its
own engine process; in a round each of them runs once, and the order rotates. A gap counts if it ends after the prompt
was sent and begins before its first token. TTFT is that of the long prompt: what a small budget costs.

    python benchmarks/budget_gaps.py --json benchmarks/results/budget-gaps-cpu.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter

from about import commit, cpu_name

from headrace import AsyncEngine, SamplingParams
from headrace.config import EngineOptions
from headrace.version import __version__

BUDGETS = (64, 256, 1024, 2048)
NUM_STREAMS = 8
NUM_ROUNDS = 5
LONG_PROMPT, SHORT_PROMPT = 1500, 32  # tokens
NUM_BEFORE = 8  # tokens of each stream before the long prompt is sent
MAX_TOKENS = 300  # of each stream: more than steps of a long prompt; all streams fit into the cache
SETTINGS: EngineOptions = {
    "max_num_seqs": NUM_STREAMS + 1,
    "max_model_len": 2048,
    "num_gpu_blocks_override": 512,
    "enable_prefix_caching": False,
}


@dataclass(frozen=True)
class Run:
    budget: int
    round: int
    worst_gap_ms: float  # of all streams
    worst_gap_ms_by_stream: list[float]
    usual_gap_ms: float  # median, before the long prompt
    ttft_ms: float  # of the long prompt


def prompt(num_tokens: int, rng: random.Random) -> dict[str, list[int]]:
    return {"prompt_token_ids": [rng.randrange(1000, 40_000) for _ in range(num_tokens)]}


async def run_once(engine: AsyncEngine, budget: int, number: int) -> Run:
    rng = random.Random(number)  # the same prompts for every budget
    times: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
    answers = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.0)

    async def decode(stream: int) -> None:
        async for _ in engine.generate(prompt(SHORT_PROMPT, rng), answers):
            times[stream].append(perf_counter())

    tasks = [asyncio.create_task(decode(stream)) for stream in range(NUM_STREAMS)]
    while min(map(len, times)) < NUM_BEFORE:
        await asyncio.sleep(0.001)
    sent = perf_counter()
    async for _ in engine.generate(prompt(LONG_PROMPT, rng), SamplingParams(max_tokens=1, ignore_eos=True)):
        pass
    first_token = perf_counter()
    seen = [len(stream) for stream in times]
    while any(len(stream) <= count for stream, count in zip(times, seen, strict=True)):
        await asyncio.sleep(0.001)  # the gap that the last step made has ended
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    worst = [1e3 * max(b - a for a, b in pairwise(each) if b > sent and a < first_token) for each in times]
    usual = [1e3 * (b - a) for each in times for a, b in pairwise(each) if b <= sent]
    return Run(budget, number, max(worst), worst, median(usual), 1e3 * (first_token - sent))


async def measure(num_rounds: int) -> list[Run]:
    engines = {}
    for budget in BUDGETS:
        engines[budget] = await AsyncEngine.start(own_process=True, max_num_batched_tokens=budget, **SETTINGS)
        await run_once(engines[budget], budget, 0)  # warm-up
    runs = []
    for number in range(1, num_rounds + 1):
        first = number % len(BUDGETS)
        for budget in (*BUDGETS[first:], *BUDGETS[:first]):
            runs.append(await run_once(engines[budget], budget, number))
            print(f"round {number} budget {budget:>5}: worst gap {runs[-1].worst_gap_ms:8.0f} ms", flush=True)
    for engine in engines.values():
        await engine.close()
    return runs


def summary(runs: list[Run]) -> dict[str, dict[str, float]]:
    found = {}
    for budget in BUDGETS:
        of_budget = [run for run in runs if run.budget == budget]
        worst = sorted(run.worst_gap_ms for run in of_budget)
        found[str(budget)] = {
            "worst_gap_ms_median": median(worst),
            "worst_gap_ms_lowest": worst[0],
            "worst_gap_ms_highest": worst[-1],
            "usual_gap_ms_median": median(run.usual_gap_ms for run in of_budget),
            "ttft_ms_median": median(run.ttft_ms for run in of_budget),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--json", type=Path, help="write a record of the numbers to this file")
    parser.add_argument("--date", default=datetime.now(UTC).date().isoformat(), help="date of the record")
    parser.add_argument("--note", default="", help="what a reader of the record must know")
    args = parser.parse_args()
    load_before = os.getloadavg()
    runs = asyncio.run(measure(args.rounds))
    by_budget = summary(runs)
    for budget, figures in by_budget.items():
        print(f"budget {budget:>5}: " + ", ".join(f"{name} {value:,.0f}" for name, value in figures.items()))
    if args.json is not None:
        record = {
            "date": args.date,
            "command": " ".join(["python", *sys.argv]),
            "commit": commit(),
            "versions": {"headrace": __version__, "python": platform.python_version(), "torch": version("torch")},
            "cpu": cpu_name(),
            "num_cores": len(os.sched_getaffinity(0)),
            "load_average_before": load_before,
            "load_average_after": os.getloadavg(),
            "note": args.note,
            "model": "embedded (SmolLM2-135M-Instruct), float32",
            "num_streams": NUM_STREAMS,
            "long_prompt_tokens": LONG_PROMPT,
            "short_prompt_tokens": SHORT_PROMPT,
            "settings": SETTINGS,
            "by_budget": by_budget,
            "runs": [asdict(run) for run in runs],
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
