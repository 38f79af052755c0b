"""Whether `headrace bench` and GuideLLM measure the same: both against one null server, in turn.

Usage: python benchmarks/bench_agreement.py --guidellm VENV/bin/guidellm [--rounds 3] [--json FILE]

The server has a fixed pace, since a real engine on a shared machine varies by more than the 5 % that are asked for. The
clients take turns (A B, B A, ...), with the same prompts, in a closed loop and at a constant rate. Compared are medians
over rounds of each client's own figures. Definitions that differ:

    GuideLLM's "inter token latency" is (last - first token) / (tokens - 1) of a request: our TPOT, compared with it.
    GuideLLM's "time per output token" is (last token - start) / tokens: it contains the time to the first token. It is
    in the record and is not compared.
    Our ITL is the gap between two chunks, pooled over all requests: its mean is compared with the mean of the above.
    The first request of each client opens a connection and waits for processes that start: of the whole run, p99 is
    mostly about those. `_p99_warm` leaves them out for both, by the same rule and the same code.
    Our TTFT counts from when a request was due, GuideLLM's from when it was dispatched: at a rate, theirs leaves out
    what its scheduler was late.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.bench.load import ClosedLoop, Load, OpenLoop, run_load
from headrace.bench.load.null_server import Behaviour, null_server
from headrace.bench.record import current_commit, machine_facts, package_versions, rounded
from headrace.bench.summary import percentile, summarize
from headrace.bench.workloads import BenchRequest, Workload, WorkloadSpec

TOLERANCE = 0.05
PROMPT_WORDS, ANSWER_LEN = 64, 32
TTFT_S, ITL_S = 0.5, 0.04
CONCURRENCY, RATE = 32, 12.0
LOADS: dict[str, Load] = {
    "closed_loop": ClosedLoop(concurrency=CONCURRENCY),
    "constant_rate": OpenLoop(rate=RATE, burstiness=float("inf")),
}
FIGURES = (
    "requests_per_s",
    "output_tokens_per_s",
    *(f"{name}_ms_{statistic}" for name in ("ttft", "tpot", "e2e") for statistic in ("mean", "p50", "p99")),
    "itl_ms_mean",
    "ttft_ms_p99_warm",
    "e2e_ms_p99_warm",
)


def prompts(num_requests: int) -> list[str]:
    return [" ".join(f"w{index}x{word}" for word in range(PROMPT_WORDS)) for index in range(num_requests)]


def warm(rows: list[tuple[float, float, float]]) -> dict[str, float]:
    """p99 of (start, TTFT, end-to-end) rows, in ms, without the first request of each client."""
    later = sorted(rows)[CONCURRENCY:]
    ttft, e2e = sorted(row[1] for row in later), sorted(row[2] for row in later)
    return {"ttft_ms_p99_warm": percentile(ttft, 99), "e2e_ms_p99_warm": percentile(e2e, 99)}


def of_headrace(address: str, load: Load, texts: list[str]) -> dict[str, Any]:
    requests = [BenchRequest(prompt=text, output_len=ANSWER_LEN) for text in texts]
    workload = Workload(WorkloadSpec(name="random", num_requests=len(texts)), requests)
    result = run_load(address, workload, load, model_name="nul")
    summary = summarize(result.outcomes, result.seconds)
    assert summary["num_ok"] == len(texts), summary["errors"]
    figures = {name: summary[name] for name in ("requests_per_s", "output_tokens_per_s")}
    for name in ("ttft_ms", "tpot_ms", "e2e_ms", "itl_ms"):
        figures |= {f"{name}_{statistic}": summary[name][statistic] for statistic in ("mean", "p50", "p99")}
    rows = [(outcome.sent_s, 1e3 * outcome.ttft_s, 1e3 * outcome.e2e_s) for outcome in result.outcomes]
    return figures | warm(rows) | {"seconds": result.seconds, "client": result.client.as_json()}


def of_guidellm(command: str, address: str, load: Load, texts: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        data, out = Path(directory) / "data.jsonl", Path(directory) / "out.json"
        lines = [json.dumps({"prompt": text, "output_tokens_count": ANSWER_LEN}) for text in texts]
        data.write_text("\n".join(lines) + "\n")
        closed = isinstance(load, ClosedLoop)
        profile = f"kind=concurrent,streams={CONCURRENCY}" if closed else f"kind=constant,rate={RATE:g}"
        backend = f"kind=openai_http,target={address},model=nul,request_format=/v1/completions"
        flags = {
            "--backend": f"{backend},http2=false,validate_backend=false",
            "--profile": profile,
            "--constraint": f"kind=max_requests,count={len(texts)}",
            "--data": f"kind=json_file,path={data}",
            "--output": f"kind=json,path={out}",
        }
        argv = [command, "run", *(part for pair in flags.items() for part in pair), "--disable-console"]
        subprocess.run(argv, check=True, capture_output=True, timeout=300)
        [benchmark] = json.loads(out.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    assert 0 < totals["successful"] == totals["total"], totals
    figures = {
        "requests_per_s": metrics["requests_per_second"]["successful"]["mean"],
        "output_tokens_per_s": metrics["output_tokens_per_second"]["successful"]["mean"],
        "itl_ms_mean": metrics["inter_token_latency_ms"]["successful"]["mean"],
        "seconds": benchmark["duration"],
        "own_time_per_output_token_ms_mean": metrics["time_per_output_token_ms"]["successful"]["mean"],
    }
    sources = {"ttft": ("time_to_first_token_ms", 1), "tpot": ("inter_token_latency_ms", 1)}
    for name, (source, scale) in (sources | {"e2e": ("request_latency", 1000)}).items():
        found = metrics[source]["successful"]
        values = {"mean": found["mean"], "p50": found["percentiles"]["p50"], "p99": found["percentiles"]["p99"]}
        figures |= {f"{name}_ms_{statistic}": scale * value for statistic, value in values.items()}
    rows = [
        (request["request_start_time"], request["time_to_first_token_ms"], 1e3 * request["request_latency"])
        for request in benchmark["requests"]["successful"]
    ]
    assert len(rows) == totals["total"]
    return figures | warm(rows)


def compared(rounds: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Medians over rounds of both clients, and their ratio."""
    table = {}
    for name in FIGURES:
        ours = statistics.median(each["headrace"][name] for each in rounds)
        theirs = statistics.median(each["guidellm"][name] for each in rounds)
        table[name] = {"headrace": ours, "guidellm": theirs, "ratio": ours / theirs}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", required=True, help="the command, of a virtual environment of its own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=640)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--json", type=Path, help="write the record to this file")
    given = parser.parse_args()
    texts = prompts(given.requests)
    results = {}
    with null_server(Behaviour(ttft_s=TTFT_S, itl_s=ITL_S)) as server:
        for name in given.loads:
            load, rounds = LOADS[name], []
            for number in range(given.rounds):
                order = ["headrace", "guidellm"] if number % 2 == 0 else ["guidellm", "headrace"]
                found: dict[str, Any] = {"order": order}
                for client in order:
                    if client == "headrace":
                        found[client] = of_headrace(server.address, load, texts)
                    else:
                        found[client] = of_guidellm(given.guidellm, server.address, load, texts)
                rounds.append(found)
            results[name] = {"load": load.as_json(), "figures": compared(rounds), "rounds": rounds}
            for figure, row in results[name]["figures"].items():
                print(name, figure, *(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
    apart = {
        f"{load} {name}": row["ratio"]
        for load, result in results.items()
        for name, row in result["figures"].items()
        if abs(row["ratio"] - 1) > TOLERANCE
    }
    version = subprocess.run([given.guidellm, "--version"], capture_output=True, text=True, check=True).stdout
    record = {
        "benchmark": "bench_agreement",
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python benchmarks/bench_agreement.py --guidellm guidellm "
        f"--rounds {given.rounds} --requests {given.requests} --loads {' '.join(given.loads)}",
        "server": f"null server with a fixed pace: first token after {TTFT_S:g} s, then one every {ITL_S:g} s",
        "num_requests": given.requests,
        "prompt_words": PROMPT_WORDS,
        "answer_len": ANSWER_LEN,
        "tolerance": TOLERANCE,
        "beyond_tolerance": apart,
        "results": results,
        "machine": machine_facts(),
        "versions": package_versions() | {"guidellm": version.rpartition(":")[2].strip()},
        "commit": current_commit(),
    }
    if given.json is not None:
        given.json.write_text(json.dumps(rounded(record), indent=1) + "\n")
    if apart:
        sys.exit(f"more than {TOLERANCE:.0%} apart: {apart}")


if __name__ == "__main__":
    main()
