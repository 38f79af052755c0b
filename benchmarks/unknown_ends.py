"""What it costs not to know when answers end: a workload whose answers end by themselves, and the same lengths known.

    python benchmarks/unknown_ends.py --model llama-3.1-8b --json benchmarks/results/unknown-ends-h200.jsonl
    python benchmarks/unknown_ends.py --model DIR --requests 32 --mean-output 24 --set num_gpu_blocks_override=96

Weights are random: those of a shape, or for the config.json of a directory. Answers sample from about a thousand token
ids, four of which end them: their lengths are about geometric, and at most eight times their mean. The lengths of the
first round are then asked for exactly, from the same ids, with end of sequence ignored. Both kinds take turns, so that
a machine that slows down slows both. All requests are submitted at once: an engine that knows the lengths starts the
longest first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from headrace.bench.engines import OfflineRun, RunningEngine
from headrace.bench.engines.headrace_engine import HeadraceEngine
from headrace.bench.engines.shapes import SHAPES
from headrace.bench.offline import warm_up_of
from headrace.bench.record import new_record, rounded
from headrace.bench.workloads import Workload, WorkloadSpec, build
from headrace.bench.workloads.spec import LAST_TOKEN_ID

COUNTERS = ("num_steps", "num_preemptions", "num_recomputed_tokens")


def run_round(engine: RunningEngine, workload: Workload, name: str) -> OfflineRun:
    engine.reset_prefix_cache()
    run = engine.run_offline(workload)
    counters = {counter: run.counters.get(counter) for counter in COUNTERS}
    print(f"{name:<8} {run.seconds:8.2f} s, {sum(run.output_lens):,} tokens, {rounded(counters)}", flush=True)
    return run


def measure(engine: RunningEngine, given: argparse.Namespace) -> dict[str, Any]:
    last_id = LAST_TOKEN_ID if given.model in SHAPES else _vocab_size(Path(given.model))
    spec = WorkloadSpec(name="open", num_requests=given.requests, output_len=given.mean_output, last_token_id=last_id)
    unknown = build(spec).with_seeds()
    record = new_record("unknown_ends", engine, unknown, given.commit)
    engine.run_offline(warm_up_of(unknown))
    first = run_round(engine, unknown, "lengths")
    known = unknown.with_known_lengths(first.output_lens)
    rounds: dict[str, list[OfflineRun]] = {"unknown": [], "known": []}
    for number in range(given.rounds):
        order = (("unknown", unknown), ("known", known))
        for name, workload in order if number % 2 == 0 else reversed(order):
            rounds[name].append(run_round(engine, workload, name))
    return _summary(record, first, rounds)


def _vocab_size(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def _summary(record: dict[str, Any], first: OfflineRun, rounds: dict[str, list[OfflineRun]]) -> dict[str, Any]:
    rates = {
        name: statistics.median(sum(run.output_lens) / run.seconds for run in runs) for name, runs in rounds.items()
    }
    return {
        "model": record["model"],
        "workload": record["workload"],
        "output_lens": {
            "mean": round(statistics.mean(first.output_lens), 1),
            "median": statistics.median(first.output_lens),
            "max": max(first.output_lens),
        },
        "output_tokens_per_s": rounded(rates),
        "cost_of_not_knowing": round(rates["known"] / rates["unknown"] - 1.0, 4),
        "rounds": {
            name: [
                {"seconds": round(run.seconds, 3), "output_tokens": sum(run.output_lens)}
                | {counter: run.counters.get(counter) for counter in COUNTERS}
                for run in runs
            ]
            for name, runs in rounds.items()
        },
        "gpu": record["machine"]["gpus"][0]["name"] if record["machine"]["gpus"] else None,
        "date": record["started_at"][:10],
        "command": "python benchmarks/unknown_ends.py " + " ".join(sys.argv[1:]),
        "commit": record["commit"],
        "versions": record["versions"],
        "settings": {name: setting["value"] for name, setting in record["engine"]["settings"].items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help=f"{', '.join(SHAPES)}, or a directory")
    parser.add_argument("--requests", type=int, metavar="N", help="default: 2,000")
    parser.add_argument("--mean-output", type=int, metavar="N", help="tokens of an answer, on average (default: 256)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=N", help="an integer engine setting")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind")
    parser.add_argument("--commit", help="commit of the code, if git is not available")
    parser.add_argument("--json", type=Path, help="write the record here")
    given = parser.parse_args()
    chosen = {name: int(value) for name, value in (item.split("=") for item in given.set)}
    random = {} if given.model in SHAPES else {"load_format": "random"}
    with HeadraceEngine(given.model).start(chosen | random, serves=False) as engine:
        found = measure(engine, given)
    print(f"not knowing the lengths costs {found['cost_of_not_knowing']:+.1%} of the throughput")
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
