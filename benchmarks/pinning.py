"""Output tokens per second of the CPU engine with and without pinned threads, interleaved.

    python benchmarks/pinning.py --rounds 4 --json benchmarks/results/pinning-cpu.json

`one engine`: an engine with all cores; `two workers`: two engines at the same time with half of the cores each, as the
workers of a job have. The default model, the same prompts, greedy, end of sequence ignored.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

from about import record_facts

from headrace.hardware.cpu_list import cpu_list

NUM_PROMPTS, OUTPUT_LEN = 64, 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", help="write the record here")
    parser.add_argument("--engine", nargs=2, metavar=("AFFINITY", "THREADS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        print(_tokens_per_s(given.engine[0], int(given.engine[1])))
        return
    cpus = sorted(os.sched_getaffinity(0))
    half = len(cpus) // 2
    layouts = {
        ("one engine", "none"): [("none", len(cpus))],
        ("one engine", "pinned"): [(cpu_list(cpus), len(cpus))],
        ("two workers", "none"): [("none", half)] * 2,
        ("two workers", "pinned"): [(cpu_list(cpus[:half]), half), (cpu_list(cpus[half:]), half)],
    }
    rounds = [
        {"round": number, "layout": layout, "threads": threads, "tokens_per_s": _measure(engines)}
        for number in range(given.rounds)
        for (layout, threads), engines in layouts.items()
    ]
    summary = {
        f"{layout}, {threads}": median(
            one["tokens_per_s"] for one in rounds if (one["layout"], one["threads"]) == (layout, threads)
        )
        for layout, threads in layouts
    }
    print(json.dumps(summary, indent=1))
    if given.json:
        record = {
            **record_facts(),
            "median_tokens_per_s": summary,
            "rounds": rounds,
        }
        Path(given.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _measure(engines: list[tuple[str, int]]) -> float:
    """The sum of engines that run at the same time."""
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "--engine", affinity, str(threads)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for affinity, threads in engines
    ]
    return round(sum(float(engine.communicate()[0]) for engine in running), 1)


def _tokens_per_s(affinity: str, num_threads: int) -> float:
    from headrace import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    prompts = [f"Story {number}: a river" for number in range(NUM_PROMPTS)]
    with LLM(cpu_affinity=affinity, num_threads=num_threads) as llm:
        llm.generate(prompts[:4], params, use_tqdm=False)
        started = perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = perf_counter() - started
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


if __name__ == "__main__":
    main()
