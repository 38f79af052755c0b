"""What it costs a server to be watched: two servers under the same load, in turn, one of which does not watch itself.

    python benchmarks/watching_cost.py --json FILE                                           the embedded model
    python benchmarks/watching_cost.py --model llama-3.2-1b --streams 512 --requests 3072 --input-len 32 \\
        --output-len 128 --clients 4 --json FILE                                             on a GPU
    python benchmarks/watching_cost.py --parts ... --json FILE                               the CPU time of each part

The watched server samples its metrics, evaluates alerts, diagnoses itself, logs its load and reads the GPU's figures,
as every server does. During its rounds an open dashboard polls its data each second, and a Prometheus server scrapes
it every five. The other one does none of it (`faults/sitecustomize.py`), and nobody asks it. Both count their
metrics: `metrics_cost.py` has the cost of that. Rounds alternate (A B, B A, ...); the ratio is paired by round.

With `--parts` there is only the watched server, and the CPU time of each part is taken where it runs
(`faults/timed_watching.py`). It does not depend on how the throughput of rounds varies. Where the HTTP process is what
limits a server, watching takes its share of that process from the throughput.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, NamedTuple

import staging
from about import commit

from headrace.bench.engines import RunningEngine
from headrace.bench.engines.headrace_engine import HeadraceEngine
from headrace.bench.load import ClosedLoop, run_load
from headrace.bench.record import rounded
from headrace.bench.statistics import ratio_of_rounds
from headrace.config import EMBEDDED_MODEL
from headrace.hardware.describe import machine_facts, package_versions

POLLS = {"/dashboard/data": 1.0, "/metrics": 5.0, "/alerts": 10.0, "/bottleneck": 10.0}  # seconds between two
BLOCK_SIZE = 16


@contextmanager
def asked(address: str) -> Iterator[dict[str, int]]:
    """Ask as a dashboard and a Prometheus server do, in a thread for each address; yields how often each answered."""
    stop, answers = threading.Event(), dict.fromkeys(POLLS, 0)

    def ask(path: str, interval_s: float) -> None:
        while not stop.wait(interval_s):
            with urllib.request.urlopen(address + path, timeout=30) as answer:
                answer.read()
            answers[path] += 1

    threads = [threading.Thread(target=ask, args=each, daemon=True) for each in POLLS.items()]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        stop.set()
        for thread in threads:
            thread.join()


class Round(NamedTuple):
    tokens_per_s: float
    front_cpu_ms: float  # of the HTTP process, per second


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(server: RunningEngine, given: argparse.Namespace, seed: int) -> Round:
    """Every round has prompts of its own, so that none are found in the prefix cache."""
    work = staging.workload(given.input_len, given.output_len, given.requests, vocabulary=given.vocabulary, seed=seed)
    load = ClosedLoop(concurrency=given.streams, num_requests=given.requests)
    assert server.address is not None
    front = server.pids()[0]
    before = cpu_seconds(front)
    result = run_load(server.address, work, load, model_name=server.model_name, num_processes=given.clients)
    spent = cpu_seconds(front) - before
    if result.server_died or any(outcome.status != "ok" for outcome in result.outcomes):
        raise SystemExit("a request was not answered")
    return Round(given.requests * given.output_len / result.seconds, 1e3 * spent / result.seconds)


def _settings(given: argparse.Namespace) -> dict[str, int]:
    num_blocks = 2 * given.streams * -(-(given.input_len + given.output_len) // BLOCK_SIZE)  # both must fit on a GPU
    return {"max_num_seqs": given.streams, "num_gpu_blocks_override": num_blocks, "max_model_len": 512}


def _about(given: argparse.Namespace, kind: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": given.commit or commit(),
        "machine": machine_facts(),
        "versions": package_versions(),
        "model": given.model,
        "streams": given.streams,
        "workload": {"num_requests": given.requests, "input_len": given.input_len, "output_len": given.output_len},
    }


def measure(given: argparse.Namespace) -> dict[str, Any]:
    settings = _settings(given)
    rounds: dict[str, list[Round]] = {"watched": [], "unwatched": []}
    answered = dict.fromkeys(POLLS, 0)
    with ExitStack() as stack:
        watched = stack.enter_context(HeadraceEngine(given.model).start(settings, serves=True))
        with staging.faults({"HEADRACE_UNWATCHED": "1"}):
            unwatched = stack.enter_context(HeadraceEngine(given.model).start(settings, serves=True))
        servers = {"watched": watched, "unwatched": unwatched}
        for server in servers.values():
            measured(server, given, seed=0)  # compiles, and fills allocators
        for number in range(given.rounds):
            for name in list(rounds)[:: 1 if number % 2 == 0 else -1]:
                with ExitStack() as polls:
                    if name == "watched":
                        assert watched.address is not None
                        answers = polls.enter_context(asked(watched.address))
                    rounds[name].append(measured(servers[name], given, seed=number + 1))
                if name == "watched":
                    answered = {path: answered[path] + answers[path] for path in POLLS}
                rate, cpu_ms = rounds[name][-1]
                print(f"round {number + 1}, {name}: {rate:,.1f} output tokens/s, front {cpu_ms:.1f} ms/s", flush=True)
    return {
        **_about(given, "watching-cost"),
        "polls_answered": answered,
        "output_tokens_per_s": {name: [each.tokens_per_s for each in found] for name, found in rounds.items()},
        "front_cpu_ms_per_s": {name: [each.front_cpu_ms for each in found] for name, found in rounds.items()},
        "watched_to_unwatched": ratio(rounds),
        "extra_cpu_ms_per_s": extra_cpu_ms(rounds),
    }


def measure_parts(given: argparse.Namespace) -> dict[str, Any]:
    """CPU milliseconds per second of each part, over all rounds; each round is also polled."""
    rounds, answered, spans = [], dict.fromkeys(POLLS, 0), []
    with tempfile.NamedTemporaryFile() as times:
        with ExitStack() as stack:
            stack.enter_context(staging.faults({"HEADRACE_WATCHING_TIMES": times.name}))
            server = stack.enter_context(HeadraceEngine(given.model).start(_settings(given), serves=True))
            assert server.address is not None
            measured(server, given, seed=0)
            for number in range(given.rounds):
                started = monotonic()
                with asked(server.address) as answers:
                    rounds.append(measured(server, given, seed=number + 1))
                spans.append((started, monotonic()))
                answered = {path: answered[path] + answers[path] for path in POLLS}
                print(f"round {number + 1}: {rounds[-1].tokens_per_s:,.1f} output tokens/s", flush=True)
        lines = [line.rsplit(" ", 1) for line in Path(times.name).read_text().splitlines()]
    parts: dict[str, float] = {}
    for when_and_part, seconds in lines:
        when, part = when_and_part.split(" ", 1)
        if any(start <= float(when) <= end for start, end in spans):
            parts[part] = parts.get(part, 0.0) + float(seconds)
    duration = sum(end - start for start, end in spans)
    found = {part: 1e3 * seconds / duration for part, seconds in sorted(parts.items())}
    return {
        **_about(given, "watching-parts"),
        "polls_answered": answered,
        "output_tokens_per_s": [each.tokens_per_s for each in rounds],
        "front_cpu_ms_per_s": [each.front_cpu_ms for each in rounds],
        "watching_cpu_ms_per_s": found,
        "sum_cpu_ms_per_s": sum(found.values()),
    }


def ratio(rounds: dict[str, list[Round]]) -> dict[str, float]:
    found = ratio_of_rounds(
        [each.tokens_per_s for each in rounds["unwatched"]],
        [each.tokens_per_s for each in rounds["watched"]],
        is_paired=True,
    )
    assert found is not None
    return {"value": found.value, "low": found.low, "high": found.high}


def extra_cpu_ms(rounds: dict[str, list[Round]]) -> float:
    """CPU time that watching takes of the HTTP process. Its work per token is the same, so that it grows with tokens/s:
    that part is taken out by the other server's time per token."""
    per_token = median(each.front_cpu_ms / each.tokens_per_s for each in rounds["unwatched"])
    return median(each.front_cpu_ms - per_token * each.tokens_per_s for each in rounds["watched"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--vocabulary", type=int, default=staging.VOCABULARY, help="tokens below it are in the prompts")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256, help="of each round")
    parser.add_argument("--input-len", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--clients", type=int, default=1, help="client processes")
    parser.add_argument("--commit", default="", help="for a copy without its git directory")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parts", action="store_true", help="the CPU time of each part, where it runs")
    given = parser.parse_args()
    record = measure_parts(given) if given.parts else measure(given)
    if given.parts:
        for part, milliseconds in record["watching_cpu_ms_per_s"].items():
            print(f"{part:<20} {milliseconds:6.2f} ms/s")
        print(f"{'sum':<20} {record['sum_cpu_ms_per_s']:6.2f} ms/s")
    else:
        found = record["watched_to_unwatched"]
        print(f"output tokens/s, watched to unwatched: {found['value']:.4f} [{found['low']:.4f}, {found['high']:.4f}]")
        print(f"CPU time of watching: {record['extra_cpu_ms_per_s']:.1f} ms/s")
    if given.json is not None:
        given.json.write_text(json.dumps(rounded(record), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
