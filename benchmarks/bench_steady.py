"""Whether `headrace bench` finds an injected warm-up: a real run against a null server that is slow for its first 20 s.

Usage: python benchmarks/bench_steady.py [--warm-up 20] [--seconds 70] [--json FILE]

The null server gives a token every 20 ms, and every 40 ms during the warm-up. The end of the warm-up must be found
within one bin. A second run without a warm-up must lose its first bin at most, in which all clients wait for their
first token.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.bench.load import ClosedLoop, run_load
from headrace.bench.load.null_server import Behaviour, null_server
from headrace.bench.record import current_commit, machine_facts, package_versions, rounded
from headrace.bench.steady import steady_window, summarize_window, throughput
from headrace.bench.summary import summarize
from headrace.bench.workloads import WorkloadSpec, build

CONCURRENCY, TTFT_S, ITL_S, FACTOR = 16, 0.1, 0.02, 2.0


def measured(warm_up_s: float, seconds: float) -> dict[str, Any]:
    spec = WorkloadSpec(name="random", num_requests=2000, input_len=64, output_len=64, spread=0.5)
    behaviour = Behaviour(ttft_s=TTFT_S, itl_s=ITL_S, warm_up_s=warm_up_s, warm_up_factor=FACTOR)
    with null_server(behaviour) as server:
        load = ClosedLoop(concurrency=CONCURRENCY, seconds=seconds)
        result = run_load(server.address, build(spec), load, model_name="null")
    window = steady_window(result.outcomes)
    names = ("seconds", "num_requests", "num_ok", "requests_per_s", "output_tokens_per_s", "ttft_ms", "tpot_ms")
    whole, steady = summarize(result.outcomes, result.seconds), summarize_window(result.outcomes, window)
    num_bins = int(window.end_s / window.bin_s) if window.bin_s else 0
    return {
        "injected_warm_up_s": warm_up_s,
        "window": window.as_json(),
        "is_found": window.is_steady and abs(window.start_s - warm_up_s) <= (window.bin_s or 0.0),
        "whole": {name: whole[name] for name in names},
        "steady": {name: steady[name] for name in names},
        "output_tokens_per_s_of_bins": throughput(result.outcomes, window.bin_s or 1.0, num_bins),
        "client": result.client.as_json(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm-up", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=70.0)
    parser.add_argument("--json", type=Path, help="write the record to this file")
    given = parser.parse_args()
    runs = []
    for warm_up_s in (given.warm_up, 0.0):
        runs.append(measured(warm_up_s, given.seconds))
        print(json.dumps(rounded(runs[-1])), flush=True)
    record = {
        "benchmark": "bench_steady",
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python benchmarks/bench_steady.py " + " ".join(sys.argv[1:]),
        "server": f"null server: first token after {TTFT_S:g} s, then one every {ITL_S:g} s; {FACTOR:g} times as long "
        "during the warm-up",
        "load": f"closed loop, concurrency {CONCURRENCY}, {given.seconds:g} s, 32 to 96 tokens",
        "runs": runs,
        "machine": machine_facts(),
        "versions": package_versions(),
        "commit": current_commit(),
    }
    if given.json is not None:
        given.json.write_text(json.dumps(rounded(record), indent=1) + "\n")
    if not all(run["is_found"] for run in runs):
        sys.exit("the warm-up's end was not found within one bin")


if __name__ == "__main__":
    main()
