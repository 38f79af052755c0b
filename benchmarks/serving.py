"""Throughput against latency: closed-loop clients stream /v1/completions from a `headrace serve` that this starts.

Usage: python benchmarks/serving.py --model llama-3.2-1b [--concurrency 16 64 256 512] [--offline] [--json FILE]

The same as `headrace bench MODEL --workload random --concurrency ...`, with one flat line per level and vLLM's figures
beside it: prompts of random token ids, answers of a fixed length, end of sequence ignored, temperature 1. With equal
lengths requests start and end together. With `--spread` lengths vary, and prefills mix with decodes, as in most
traffic. Models named by their shape have random weights. `--offline` also gives the requests of the largest level to
`LLM.generate`, after the server has stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.bench.engines.headrace_engine import HeadraceEngine
from headrace.bench.engines.shapes import SHAPES
from headrace.bench.offline import measure_offline
from headrace.bench.online import Client, loads_of, measure_online, num_requests_of
from headrace.bench.workloads import Workload, WorkloadSpec, build
from headrace.models import open_checkpoint

# vLLM 0.26.0's server with its defaults on one H200: output tokens/s, p95 of the time to the first token (ms), p95 of
# the time per output token (ms).
VLLM = {
    ("llama-3.2-1b", 16): (4473, 98, 3.28),
    ("llama-3.2-1b", 64): (11499, 226, 5.05),
    ("llama-3.2-1b", 256): (9631, 824, 23.5),
    ("llama-3.2-1b", 512): (12826, 2799, 38.7),
    ("llama-3.1-8b", 16): (2346, 228, 6.0),
    ("llama-3.1-8b", 64): (5024, 820, 10.7),
    ("llama-3.1-8b", 256): (5716, 3153, 40.0),
    ("llama-3.1-8b", 512): (6215, 5527, 73.5),
}
FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}


def workload_of(given: argparse.Namespace, num_requests: int) -> Workload:
    vocab_size = SHAPES[given.model]["vocab_size"] if given.model in SHAPES else _vocab_size(given.model)
    spec = WorkloadSpec(
        name="random",
        num_requests=num_requests,
        input_len=given.prompt_len,
        output_len=given.answer_len,
        spread=given.spread,
    )
    return build(spec.for_vocabulary(vocab_size))


def _vocab_size(model: str) -> int:
    return open_checkpoint(model).spec.vocab_size


def levels(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a flat record per concurrency level, and one of the offline rate compared with the largest level."""
    engine, settings = HeadraceEngine(given.model), FP8 if given.dtype == "fp8" else {}
    loads = loads_of(concurrency=given.concurrency, num_requests=given.requests)
    workload = workload_of(given, sum(num_requests_of(load) or 0 for load in loads))
    queue = {"max_num_queued_reqs": 2 * max(given.concurrency)}
    with engine.start(settings | queue, serves=True) as running:
        measured = measure_online(
            running, workload, loads, client=Client(num_processes=given.client_processes), commit=given.commit
        )
    record = measured.record
    for level in record["levels"]:
        yield flat(level) | about(given, record, level["load"]["concurrency"])
    if given.offline:
        largest = max(record["levels"], key=lambda level: level["load"]["concurrency"])
        with engine.start(settings, serves=False) as running:
            offline = measure_offline(running, workload.first(largest["summary"]["num_requests"]), num_rounds=1)
        rate = offline["summary"]["output_tokens_per_s"]
        share = round(largest["summary"]["output_tokens_per_s"] / rate, 3)
        concurrency = largest["load"]["concurrency"]
        yield {"offline_out_tok_s": round(rate), "concurrency": concurrency, "share": share} | about(
            given, record, None
        )


def flat(level: dict[str, Any]) -> dict[str, Any]:
    summary = level["summary"]
    return {
        "concurrency": level["load"]["concurrency"],
        "requests": summary["num_ok"],
        "seconds": round(summary["seconds"], 2),
        "req_s": round(summary["requests_per_s"], 2),
        "out_tok_s": round(summary["output_tokens_per_s"]),
        **{f"ttft_ms_p{p}": round(summary["ttft_ms"][f"p{p}"], 1) for p in (50, 95)},
        **{f"tpot_ms_p{p}": round(summary["tpot_ms"][f"p{p}"], 2) for p in (50, 95)},
        "total_s_p95": round(summary["e2e_ms"]["p95"] / 1e3, 2),
        "client_busy": round(max(level["client"]["cpu_shares"]), 2),
        "engine_processes": level["telemetry"]["processes"],
        "gpu": level["telemetry"]["gpu"],
        "warnings": level["warnings"],
    }


def about(given: argparse.Namespace, record: dict[str, Any], concurrency: int | None) -> dict[str, Any]:
    vllm = VLLM.get((given.model, concurrency or 0)) if not given.spread else None
    reference = dict(zip(("vllm_out_tok_s", "vllm_ttft_ms_p95", "vllm_tpot_ms_p95"), vllm, strict=True)) if vllm else {}
    machine = record["machine"]
    return {
        "model": given.model,
        "dtype": given.dtype,
        "prompt_len": given.prompt_len,
        "answer_len": given.answer_len,
        **({"spread": given.spread} if given.spread else {}),
        **reference,
        "ready_seconds": round(record["engine"]["start_s"], 1),
        "device": machine["gpus"][0]["name"] if machine["gpus"] else f"{machine['cpu']}, {os.cpu_count()} threads",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": record["commit"],
        "workload": record["workload"]["hash"],
        "versions": record["versions"],
        "command": "python benchmarks/serving.py " + " ".join(sys.argv[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help=f"{', '.join(SHAPES)}, or any model")
    parser.add_argument("--dtype", default="auto", choices=["auto", "fp8"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 64, 256, 512])
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--answer-len", type=int, default=128)
    parser.add_argument("--spread", type=float, default=0.0, help="share by which lengths vary around those given")
    parser.add_argument("--requests", type=int, help="per concurrency level; default: four per client, at least 64")
    parser.add_argument("--client-processes", type=int, default=max(1, min(6, ((os.cpu_count() or 1) - 4) // 2)))
    parser.add_argument("--offline", action="store_true", help="also measure LLM.generate")
    parser.add_argument("--commit")
    parser.add_argument("--json", type=Path, help="append each record to this file")
    given = parser.parse_args()
    for record in levels(given):
        print(json.dumps(record), flush=True)
        if given.json is not None:
            with given.json.open("a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
