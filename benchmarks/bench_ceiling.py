"""How many streamed tokens/s one client process of `headrace bench` can take: its ceiling, against a null server.

Usage: python benchmarks/bench_ceiling.py [--concurrency 64 256 512] [--seconds 10] [--json FILE]

Every token is one write of the server, as with a real server. `tokens_per_read` says how many arrived at the same time
in one stream: 1 unless the machine is so busy that the client runs late. The null server runs in one process of its
own. The pace is fixed, so the rate is not the client's choice: `ceiling_tokens_per_s` divides the tokens by the CPU
time that the client needed for them. It is what one core gives, and it holds on a machine that is shared, where the
wall clock says less.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.bench.load import ClosedLoop, run_load
from headrace.bench.load.null_server import Behaviour, null_server
from headrace.bench.record import current_commit, machine_facts, package_versions, rounded
from headrace.bench.summary import summarize
from headrace.bench.workloads import WorkloadSpec, build

WANTED_TOKENS_PER_S = 20_000
TTFT_S, ITL_S = 0.05, 0.01
PROMPT_LEN, ANSWER_LEN = 128, 128


def level(concurrency: int, seconds: float) -> dict[str, Any]:
    """One level of paced streams, and what the client needed for it."""
    workload = build(WorkloadSpec(name="random", num_requests=2000, input_len=PROMPT_LEN, output_len=ANSWER_LEN))
    with null_server(Behaviour(ttft_s=TTFT_S, itl_s=ITL_S)) as server:
        load = ClosedLoop(concurrency=concurrency, seconds=seconds)
        result = run_load(server.address, workload, load, model_name="null")
    summary = summarize(result.outcomes, result.seconds)
    assert summary["num_ok"] == summary["num_requests"] > 0, summary["errors"]
    [share] = result.client.cpu_shares
    rate = summary["output_tokens_per_s"]
    chunks = sum(len(outcome.chunk_s) for outcome in result.outcomes)
    assert chunks == summary["num_output_tokens"]
    reads = sum(len(set(outcome.chunk_s)) for outcome in result.outcomes)
    return {
        "concurrency": concurrency,
        "offered_tokens_per_s": concurrency * ANSWER_LEN / (TTFT_S + (ANSWER_LEN - 1) * ITL_S),
        "output_tokens_per_s": rate,
        "requests_per_s": summary["requests_per_s"],
        "client_cpu_share": share,
        "client_cpu_us_per_token": 1e6 * share / rate,
        "ceiling_tokens_per_s": rate / share,
        "tokens_per_read": chunks / reads,
        "tpot_ms": summary["tpot_ms"],
        "itl_ms": summary["itl_ms"],
        "ttft_ms": summary["ttft_ms"],
        "client": result.client.as_json(),
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path, help="write the record to this file")
    given = parser.parse_args()
    levels = []
    for concurrency in given.concurrency:
        levels.append(level(concurrency, given.seconds))
        print(json.dumps(rounded(levels[-1])), flush=True)
    best = max(each["output_tokens_per_s"] for each in levels)
    record = {
        "benchmark": "bench_ceiling",
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python benchmarks/bench_ceiling.py " + " ".join(sys.argv[1:]),
        "server": f"null server, one process: first token after {TTFT_S:g} s, then one every {ITL_S:g} s",
        "num_client_processes": 1,
        "best_output_tokens_per_s": best,
        "wanted_output_tokens_per_s": WANTED_TOKENS_PER_S,
        "levels": levels,
        "machine": machine_facts(),
        "versions": package_versions(),
        "commit": current_commit(),
    }
    if given.json is not None:
        given.json.write_text(json.dumps(rounded(record), indent=1) + "\n")
    if best < WANTED_TOKENS_PER_S:
        sys.exit(f"only {best:,.0f} tokens/s, {WANTED_TOKENS_PER_S:,} are wanted")


if __name__ == "__main__":
    main()
