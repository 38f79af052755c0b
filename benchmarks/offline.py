"""Seconds for a whole offline workload on a GPU, with random weights: one command per model shape.

    python benchmarks/offline.py --model llama-3.1-8b --workload chat --json benchmarks/results/8b.jsonl
    python benchmarks/offline.py --model llama-3.1-8b --fp8

The same as `headrace bench MODEL --workload NAME`, several workloads with one start, with vLLM's best time and the
hardware limit beside each. All requests are submitted at once; end of sequence is ignored and temperature is 1, as for
every engine measured on these workloads. The record's figure is the best round; it holds all rounds.
`benchmarks/profile_step.py` shows where the time goes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.bench.engines import RunningEngine
from headrace.bench.engines.headrace_engine import HeadraceEngine
from headrace.bench.engines.shapes import SHAPES
from headrace.bench.offline import measure_offline
from headrace.bench.record import rounded
from headrace.bench.workloads import WorkloadSpec, build

# Seconds by (model, workload, dtype): vLLM 0.26.0 on one H200 with the best settings tried; and the limit of the
# hardware when its parts run one after the other without waste. See docs/performance.md for both.
VLLM_BEST_SECONDS = {
    ("llama-3.2-1b", "chat", "bfloat16"): 17.5,
    ("llama-3.2-1b", "decode", "bfloat16"): 31.0,
    ("llama-3.2-1b", "prefix", "bfloat16"): 10.5,
    ("llama-3.2-3b", "chat", "bfloat16"): 25.6,
    ("llama-3.2-3b", "decode", "bfloat16"): 53.9,
    ("llama-3.2-3b", "prefix", "bfloat16"): 19.4,
    ("llama-3.1-8b", "chat", "bfloat16"): 33.1,
    ("llama-3.1-8b", "decode", "bfloat16"): 59.4,
    ("llama-3.1-8b", "prefill", "bfloat16"): 55.5,
    ("llama-3.1-8b", "prefix", "bfloat16"): 27.9,
    ("llama-3.1-8b", "chat", "fp8"): 28.5,
    ("llama-3.1-8b", "decode", "fp8"): 54.1,
    ("llama-3.1-8b", "prefill", "fp8"): 35.7,
    ("llama-3.1-8b", "prefix", "fp8"): 21.3,
}
LIMIT_SECONDS = {
    ("llama-3.2-1b", "chat", "bfloat16"): 4.2,
    ("llama-3.2-1b", "decode", "bfloat16"): 9.0,
    ("llama-3.2-1b", "prefix", "bfloat16"): 2.2,
    ("llama-3.2-3b", "chat", "bfloat16"): 12.5,
    ("llama-3.2-3b", "decode", "bfloat16"): 28.0,
    ("llama-3.2-3b", "prefix", "bfloat16"): 6.4,
    ("llama-3.1-8b", "chat", "bfloat16"): 23.7,
    ("llama-3.1-8b", "decode", "bfloat16"): 44.6,
    ("llama-3.1-8b", "prefill", "bfloat16"): 48.2,
    ("llama-3.1-8b", "prefix", "bfloat16"): 13.5,
    ("llama-3.1-8b", "chat", "fp8"): 13.0,
    ("llama-3.1-8b", "decode", "fp8"): 24.0,
    ("llama-3.1-8b", "prefill", "fp8"): 26.0,
    ("llama-3.1-8b", "prefix", "fp8"): 8.0,
}
WORKLOADS = ("chat", "prefill", "decode", "prefix", "few", "alone")
FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}


def measure(engine: RunningEngine, model: str, workload: str, given: argparse.Namespace) -> dict[str, Any]:
    def show(number: int, figures: Mapping[str, Any]) -> None:
        print(f"{model} {workload} round {number}: {rounded(figures)}", flush=True)

    record = measure_offline(
        engine,
        build(WorkloadSpec(name=workload, num_requests=given.requests)),
        num_rounds=given.rounds,
        commit=given.commit,
        on_round=show,
    )
    best = min(record["rounds"], key=lambda each: each["seconds"])
    key = (model, workload, "fp8" if given.fp8 else "bfloat16")
    limit = LIMIT_SECONDS.get(key) if given.requests is None else None
    return {
        "model": model,
        "workload": workload,
        "dtype": key[2],
        "seconds": round(best["seconds"], 3),
        "out_tok_s": round(best["output_tokens_per_s"]),
        **rounded(best["counters"]),
        "telemetry": rounded(best["telemetry"]),
        "rounds": [{"seconds": round(each["seconds"], 3)} for each in record["rounds"]],
        "num_requests": record["workload"]["num_requests"],
        "vllm_best_seconds": VLLM_BEST_SECONDS.get(key) if given.requests is None else None,
        "limit_seconds": limit,
        "share_of_limit": round(limit / best["seconds"], 3) if limit is not None else None,
        "workload_hash": record["workload"]["hash"],
        "ready_seconds": round(record["engine"]["start_s"], 1),
        "gpu": record["machine"]["gpus"][0]["name"] if record["machine"]["gpus"] else None,
        "date": record["started_at"][:10],
        "command": "python benchmarks/offline.py " + " ".join(sys.argv[1:]),
        "commit": record["commit"],
        "versions": record["versions"],
        "settings": {name: setting["value"] for name, setting in record["engine"]["settings"].items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), required=True)
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="may be repeated")
    parser.add_argument("--fp8", action="store_true", help="weights, activations and cache in eight bits")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=N", help="an integer engine setting")
    parser.add_argument("--requests", type=int, metavar="N", help="instead of a workload's own number")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--commit", help="commit of the code, if git is not available")
    parser.add_argument("--json", type=Path, help="write the records here")
    given = parser.parse_args()
    chosen = {name: int(value) for name, value in (item.split("=") for item in given.set)}
    lines = ""
    with HeadraceEngine(given.model).start((FP8 if given.fp8 else {}) | chosen, serves=False) as engine:
        print(f"{given.model}: ready in {engine.start_s:.1f} s", flush=True)
        for name in given.workload or WORKLOADS:
            lines += json.dumps(measure(engine, given.model, name, given)) + "\n"
            if given.json:  # after each workload, so that an interrupted run keeps the finished ones
                given.json.parent.mkdir(parents=True, exist_ok=True)
                given.json.write_text(lines)


if __name__ == "__main__":
    main()
