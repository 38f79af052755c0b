"""Situations with a known cause on the real engine, and whether `headrace doctor` names it.

Each situation is staged with the embedded model on this machine's CPU: a server under load, an offline or online
benchmark, a batch job, or a command line. Pressure is real where a CPU can show it. Where it cannot, a fault is
injected by a hook or by signals, and the record says so. Healthy situations must be "nothing wrong".

    python benchmarks/doctor_situations.py --json benchmarks/results/doctor-situations.json
    python benchmarks/doctor_situations.py --only slots-full,healthy-job
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import staging
from about import commit, cpu_name

from headrace.bench.load import ClosedLoop, OpenLoop
from headrace.doctor.diagnosis import Diagnosis, diagnose
from headrace.doctor.evidence import Evidence
from headrace.doctor.readers.command_line import read_command
from headrace.errors import HeadraceError
from headrace.hardware.describe import package_versions
from headrace.plan.gpus import find_gpu

# load: requests and settings that cause it. signals: a process is stopped in bursts (SIGSTOP), as without a core.
# hook: `faults/sitecustomize.py`. command: nothing runs.
How = Literal["load", "signals", "hook", "command"]

TIGHT = {"block_size": 4, "num_gpu_blocks_override": 32, "max_num_seqs": 12, "max_model_len": 96}
SHOWN = (
    "seconds",
    "num_steps",
    "num_requests",
    "num_running",
    "num_waiting",
    "kv_use",
    "num_preemptions",
    "recomputed_tokens",
    "prompt_share",
    "tokens_per_step",
    "host_share",
    "prefix_hit_share",
    "prompt_len",
    "output_len",
    "output_tokens_per_s",
    "prompt_tokens_per_s",
    "token_gap_p50_s",
    "token_gap_p99_s",
    "event_loop_lag_p75_s",
    "event_loop_lag_p95_s",
    "unanswered_share",
)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """`causes` are the rules that must be found, the main one first; none: healthy."""

    name: str
    injected: str
    stage: Callable[[], Evidence]
    causes: tuple[str, ...] = ()
    how: How = "load"

    @property
    def is_healthy(self) -> bool:
        return not self.causes


def tight(**changes: Any) -> dict[str, Any]:
    return {**TIGHT, **changes}


def host_bound() -> Evidence:
    with staging.tiny_model() as model:
        settings = {"load_format": "random", "max_num_seqs": 32}
        work = staging.workload(8, 64, vocabulary=512)
        return staging.live(settings, work, 32, model=model, env={"HEADRACE_SLOW_PLAN_S": "0.02"})


def prefill_without_prefixes() -> Evidence:
    with staging.tiny_model() as model:
        settings = {"load_format": "random", "max_num_seqs": 16}
        return staging.offline(settings, staging.workload(256, 1, 64, vocabulary=512), model=model)


def copies(num_lines: int) -> list[dict[str, Any]]:
    """Equal lines at temperature 0: one is computed, and the others take its answer."""
    line = staging.plain_lines(1, 1, num_words=150)[0]
    line["body"]["temperature"] = 0
    return [{**line, "custom_id": f"line-{i}"} for i in range(num_lines)]


def with_a_long_line(num_lines: int, max_tokens: int) -> list[dict[str, Any]]:
    return [*staging.plain_lines(num_lines, 4), staging.plain_lines(num_lines + 1, max_tokens)[-1]]


def command(text: str) -> Evidence:
    return read_command([text], gpu=find_gpu("H100"))


SITUATIONS = (
    Situation(
        name="cache-preempting",
        injected="a cache of 128 tokens for 12 slots, and answers whose length nobody knows in advance",
        causes=("cache-preempting",),
        stage=lambda: staging.live(tight(), staging.workload(8, 8, ends="random"), 12),
    ),
    Situation(
        name="cache-full",
        injected="a cache of 128 tokens for 12 slots, with capacity_policy guaranteed_no_evict",
        causes=("cache-full",),
        stage=lambda: staging.live(tight(capacity_policy="guaranteed_no_evict"), staging.workload(8, 24), 12),
    ),
    Situation(
        name="prefill",
        injected="prompts of 128 tokens, answers of one token",
        causes=("prefill",),
        stage=lambda: staging.live(
            {"max_num_seqs": 8, "max_num_batched_tokens": 256}, staging.workload(128, 1), 8, min_steps=6
        ),
    ),
    Situation(
        name="slots-full",
        injected="max_num_seqs 2 for 12 clients",
        causes=("slots-full",),
        stage=lambda: staging.live({"max_num_seqs": 2, "max_num_queued_reqs": 64}, staging.workload(8, 16), 12),
    ),
    Situation(
        name="small-load",
        injected="one client for 32 slots",
        causes=("small-load",),
        stage=lambda: staging.live({"max_num_seqs": 32}, staging.workload(16, 16), 1, min_steps=100),
    ),
    Situation(
        name="host",
        injected="each plan of a step takes 20 ms longer; a tiny model with random weights",
        causes=("host",),
        how="hook",
        stage=host_bound,
    ),
    Situation(
        name="front",
        injected="the server's HTTP process is stopped for 0.4 of every 0.55 s",
        causes=("front",),
        how="signals",
        stage=lambda: staging.live({"max_num_seqs": 12}, staging.workload(8, 16), 10, pauses_front=True),
    ),
    Situation(
        name="stalls",
        injected="chunked prefill off, prompts of 600 tokens beside short answers",
        causes=("stalls",),
        stage=lambda: staging.live(
            {"max_num_seqs": 8, "enable_chunked_prefill": False},
            # Answers of equal lengths end together, and the next prompts would start together with the long one.
            staging.mixed(staging.workload(8, 24, spread=0.5), staging.workload(600, 1), 4),
            4,
            min_steps=90,
        ),
    ),
    Situation(
        name="chunked-short",
        injected="a token budget of 24 for prompts of 100 tokens",
        causes=("chunked-short",),
        stage=lambda: staging.live(
            {"max_num_seqs": 8, "max_num_batched_tokens": 24}, staging.workload(100, 4), 8, min_steps=40
        ),
    ),
    Situation(
        name="slots-and-queue",
        injected="two causes: max_num_seqs 4, and a queue limit of 1,000 with 150 clients",
        causes=("slots-full", "queue"),
        stage=lambda: staging.live({"max_num_seqs": 4, "max_num_queued_reqs": 1000}, staging.workload(8, 8), 150),
    ),
    Situation(
        name="prefill-and-prefixes",
        injected="two causes: prompts of 256 tokens with answers of one, and prefix caching although none are shared; "
        "a tiny model with random weights",
        causes=("prefill", "prefix-unused"),
        stage=prefill_without_prefixes,
    ),
    Situation(
        name="refusals",
        injected="a queue of 2 for 4 slots, and 60 requests/s",
        causes=("refusals",),
        stage=lambda: staging.online(
            {"max_num_seqs": 4, "max_num_queued_reqs": 2}, staging.workload(8, 16), OpenLoop(rate=60.0, seconds=4.0)
        ),
    ),
    Situation(
        name="online-slots",
        injected="max_num_seqs 2 for a load test of 12 clients",
        causes=("slots-recorded",),
        stage=lambda: staging.online(
            {"max_num_seqs": 2, "max_num_queued_reqs": 64},
            staging.workload(8, 16),
            ClosedLoop(concurrency=12, num_requests=36),
        ),
    ),
    Situation(
        name="client-and-refusals",
        injected="two causes: the load generator is stopped for 0.4 of every 0.55 s, and a queue of 2 for 4 slots",
        causes=("client", "refusals"),
        how="signals",
        stage=lambda: staging.online_of_paused_client(
            {"max_num_seqs": 4, "max_num_queued_reqs": 2}, "--concurrency", "16", "--seconds", "8"
        ),
    ),
    Situation(
        name="client",
        injected="the load generator is stopped for 0.4 of every 0.55 s",
        causes=("client",),
        how="signals",
        stage=lambda: staging.online_of_paused_client({"max_num_seqs": 16}, "--concurrency", "8", "--seconds", "8"),
    ),
    Situation(
        name="offline-cache",
        injected="offline, a cache of 128 tokens for 12 slots",
        causes=("offline-cache",),
        stage=lambda: staging.offline(tight(), staging.workload(8, 24, 24)),
    ),
    Situation(
        name="offline-slots",
        injected="offline, max_num_seqs 2 for 24 requests",
        causes=("slots-recorded",),
        stage=lambda: staging.offline({"max_num_seqs": 2}, staging.workload(8, 16, 24)),
    ),
    Situation(
        name="offline-small-load",
        injected="offline, 4 requests for 64 slots",
        causes=("small-load",),
        stage=lambda: staging.offline({"max_num_seqs": 64}, staging.workload(8, 48, 4)),
    ),
    Situation(
        name="job-tokenizer",
        injected="a job of 8,000 equal prompts of 150 words with answers of one token: nearly all work is tokenizing",
        causes=("tokenizer",),
        stage=lambda: staging.job(copies(8_000), max_num_seqs=16),
    ),
    Situation(
        name="job-reading",
        injected="a job whose input is a pipe of 3 lines a second",
        causes=("tokenizer",),
        stage=lambda: staging.job(staging.plain_lines(30, 4, 4), lines_per_s=3, max_num_seqs=16),
    ),
    Situation(
        name="job-cache",
        injected="a job with a cache of 128 tokens for 12 slots",
        causes=("job-cache",),
        stage=lambda: staging.job(
            staging.plain_lines(60, 24, 8), max_num_seqs=12, num_gpu_blocks_override=8, max_model_len=64
        ),
    ),
    Situation(
        name="job-disk",
        injected="each write and sync of the job takes 1.5 s longer",
        causes=("disk",),
        how="hook",
        stage=lambda: staging.job(staging.plain_lines(120, 4, 4), max_num_seqs=16, env={"HEADRACE_SLOW_DISK_S": "1.5"}),
    ),
    Situation(
        name="job-tail",
        injected="a job of 16 short answers and one of 120 tokens",
        causes=("job-tail",),
        stage=lambda: staging.job(with_a_long_line(16, 120), max_num_seqs=16),
    ),
    Situation(
        name="command-memory-low",
        injected="gpu_memory_utilization 0.5",
        causes=("memory-low",),
        how="command",
        stage=lambda: command("headrace serve qwen3-8b --gpu-memory-utilization 0.5"),
    ),
    Situation(
        name="command-memory-high",
        injected="gpu_memory_utilization 0.99",
        causes=("memory-high",),
        how="command",
        stage=lambda: command("headrace serve qwen3-8b --gpu-memory-utilization 0.99"),
    ),
    Situation(
        name="healthy-server",
        injected="nothing: 10 clients for 12 slots",
        stage=lambda: staging.live({"max_num_seqs": 12}, staging.workload(8, 16), 10),
    ),
    Situation(
        name="healthy-offline",
        injected="nothing: 48 requests, with the defaults",
        stage=lambda: staging.offline({}, staging.workload(8, 16, 48)),
    ),
    Situation(
        name="healthy-online",
        injected="nothing: 8 clients for 12 slots",
        stage=lambda: staging.online(
            {"max_num_seqs": 12}, staging.workload(8, 16), ClosedLoop(concurrency=8, num_requests=24)
        ),
    ),
    Situation(
        name="healthy-job",
        injected="nothing: 36 lines for 12 slots, and a cache for 18 of them",
        stage=lambda: staging.job(
            staging.plain_lines(36, 8, 4), max_num_seqs=12, num_gpu_blocks_override=36, max_model_len=256
        ),
    ),
    Situation(
        name="healthy-command",
        injected="nothing: a server with the defaults",
        how="command",
        stage=lambda: command("headrace serve qwen3-8b"),
    ),
)


def is_right(situation: Situation, diagnosis: Diagnosis) -> bool:
    """Healthy: nothing wrong. Otherwise all causes are found, the main one as the bottleneck or the first problem."""
    if situation.is_healthy:
        return diagnosis.outcome == "nothing wrong"
    found = [finding.rule for finding in diagnosis.findings]
    first = {found[0], *(finding.rule for finding in diagnosis.problems[:1])} if found else set()
    return set(situation.causes) <= set(found) and situation.causes[0] in first


def judged(situation: Situation) -> dict[str, Any]:
    """One row of the record. A run that fails is a row too, and is not right."""
    started = time.perf_counter()
    try:
        return _judged(situation) | {"seconds": round(time.perf_counter() - started, 1)}
    except (HeadraceError, OSError, subprocess.TimeoutExpired) as error:
        return {"name": situation.name, "is_right": False, "headline": f"failed: {error}", "seconds": 0.0}


def _judged(situation: Situation) -> dict[str, Any]:
    evidence = situation.stage()
    diagnosis = diagnose(evidence)
    figures = {name: value for name, value in evidence.figures().items() if name in SHOWN}
    return {
        "name": situation.name,
        "source": evidence.source,
        "injected": situation.injected,
        "how": situation.how,
        "causes": list(situation.causes),
        "is_right": is_right(situation, diagnosis),
        "outcome": diagnosis.outcome,
        "limited_by": diagnosis.limit.limit if diagnosis.limit else None,
        "headline": diagnosis.headline,
        "findings": [
            {"rule": each.rule, "severity": each.severity, "numbers": dict(each.numbers)} for each in diagnosis.findings
        ],
        "figures": {name: float(f"{value:.4g}") for name, value in figures.items()},
        "limited_by_seconds": evidence.limited_by_seconds,
        "client": None if evidence.client is None else asdict(evidence.client),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def run(situations: Sequence[Situation], save: Callable[[Sequence[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for situation in situations:
        row = judged(situation)
        rows.append(row)
        save(rows)
        mark = "ok   " if row["is_right"] else "WRONG"
        print(f"{mark} {row['name']} ({row['seconds']:.0f} s): {row['headline']}", flush=True)
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table of docs/doctor.md."""
    table = [
        "| situation | evidence | how | what doctor says first | other problems |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        first = row["headline"].partition(". Try:")[0].partition(". Nothing wrong")
        says = first[0].rstrip(".") + ("; nothing wrong" if row["outcome"] == "nothing wrong" and first[1] else "")
        others = [f"`{each['rule']}`" for each in row["findings"][1:] if each["severity"] != "limit"]
        table.append(f"| {row['injected']} | {row['source']} | {row['how']} | {says} | {', '.join(others) or '–'} |")
    return "".join(f"{line}\n" for line in table)


def with_earlier(rows: Sequence[dict[str, Any]], path: Path | None) -> list[dict[str, Any]]:
    """These rows, and those of the record that were not run now."""
    earlier = json.loads(path.read_text())["situations"] if path is not None and path.exists() else []
    by_name = {row["name"]: row for row in (*earlier, *rows)}
    return [by_name[each.name] for each in SITUATIONS if each.name in by_name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of situations, separated by commas")
    parser.add_argument("--json", type=Path, help="write a record to this file; with --only, its other rows are kept")
    given = parser.parse_args()
    names = [name for name in given.only.split(",") if name]
    unknown = set(names) - {situation.name for situation in SITUATIONS}
    if unknown:
        parser.error(f"no such situations: {', '.join(sorted(unknown))}")

    def save(rows: Sequence[dict[str, Any]]) -> None:
        """After each situation: a run may be interrupted."""
        if given.json is not None:
            record = record_of(with_earlier(rows, given.json) if names else list(rows))
            given.json.write_text(json.dumps(record, indent=2) + "\n")

    rows = run([each for each in SITUATIONS if not names or each.name in names], save)
    num_right = sum(row["is_right"] for row in rows)
    print(f"{num_right} of {len(rows)} are right")
    return 0 if num_right == len(rows) else 1


def record_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit(),
        "cpu": cpu_name(),
        "versions": package_versions(),
        "model": "smollm2",
        "num_right": sum(row["is_right"] for row in rows),
        "num_situations": len(rows),
        "situations": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
