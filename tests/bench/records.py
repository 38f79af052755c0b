"""Small synthetic records, as offline and online benchmarks write them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.bench.outcomes import Outcome
from headrace.bench.record import SCHEMA
from headrace.bench.slo import Slo
from headrace.bench.summary import summarize, warnings_of


def base_record(kind: str = "offline", **changes: Any) -> dict[str, Any]:
    """A record without figures."""
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": kind,
        "id": "20261116-120000-abc123",
        "started_at": "2026-11-16T12:00:00+00:00",
        "command": f"headrace bench {kind} --workload chat",
        "engine": {
            "name": "headrace",
            "versions": {"headrace": "0.1.0"},
            "start_s": 4.2,
            "address": None,
            "launch_command": "headrace serve tiny --max-num-seqs 64",
            "settings": {
                "max_num_seqs": {"value": 64, "source": "given", "reason": ""},
                "enable_chunked_prefill": {"value": False, "source": "given", "reason": ""},
                "block_size": {"value": 16, "source": "default", "reason": ""},
                "max_model_len": {"value": 2048, "source": "automatic", "reason": "the model's own"},
            },
        },
        "model": {"name": "tiny", "digest": "d1" * 8, "num_layers": 2},
        "workload": {"name": "chat", "seed": 0, "hash": "0123456789abcdef", "num_requests": 200},
        "machine": {"cpu": "A CPU", "num_cores": 8, "memory_bytes": 2**34, "gpus": [], "platform": "Linux"},
        "versions": {"headrace": "0.1.0", "python": "3.11.2", "torch": "2.11.0"},
        "commit": "18ee95e",
        "warnings": [],
    }
    return record | changes


def offline_round(tokens_per_s: float, **counters: float) -> dict[str, Any]:
    return {
        "seconds": 40_000 / tokens_per_s,
        "output_tokens_per_s": tokens_per_s,
        "total_tokens_per_s": 2 * tokens_per_s,
        "requests_per_s": tokens_per_s / 200,
        "counters": {"num_steps": 500, "num_preemptions": 0, "host_ms_per_step": 0.8, **counters},
    }


def offline_record(rates: Sequence[float] = (1000.0, 1010.0, 990.0), **changes: Any) -> dict[str, Any]:
    rounds = [offline_round(rate) for rate in rates]
    ordered = sorted(rounds, key=lambda each: float(each["output_tokens_per_s"]))
    summary = {"best": ordered[-1], "median": ordered[len(ordered) // 2]} if ordered else {}
    return base_record("offline", rounds=rounds, summary=summary, **changes)


def outcomes(
    count: int = 200,
    *,
    seed: int = 0,
    ttft_s: float = 0.05,
    tpot_s: float = 0.01,
    num_output_tokens: int = 32,
    num_refused: int = 0,
    seconds: float = 20.0,
) -> list[Outcome]:
    """Answered requests with long-tailed latencies, then refused ones."""
    rng = random.Random(seed)
    rows = []
    for index in range(count):
        sent = seconds * index / count
        first = sent + ttft_s * rng.lognormvariate(0, 0.4)
        gaps = [tpot_s * rng.lognormvariate(0, 0.2) for _ in range(num_output_tokens - 1)]
        chunks = [first]
        for gap in gaps:
            chunks.append(chunks[-1] + gap)
        rows.append(
            Outcome(
                index=index,
                due_s=sent,
                sent_s=sent,
                first_s=first,
                end_s=chunks[-1],
                num_prompt_tokens=100,
                num_output_tokens=num_output_tokens,
                chunk_s=chunks,
            )
        )
    rows += [
        Outcome(index=count + i, due_s=1.0, sent_s=1.0, end_s=1.01, status="refused", error="503 queue is full")
        for i in range(num_refused)
    ]
    return rows


def level(
    concurrency: int,
    rows: Sequence[Outcome],
    *,
    seconds: float = 20.0,
    slo: str | None = None,
    steady: tuple[float, float] | None = (3.0, 18.0),
    **changes: Any,
) -> dict[str, Any]:
    """A level with the figures of its rows."""
    objective = Slo.parse(slo) if slo else None
    summary = summarize(rows, seconds, objective)
    found: Mapping[str, Any] = {"reason": "the run was shorter than two windows"}
    if steady is not None:
        inside = [row for row in rows if steady[0] <= row.end_s <= steady[1]]
        found = {
            "start_s": steady[0],
            "end_s": steady[1],
            "summary": summarize(inside, steady[1] - steady[0], objective),
        }
    rate = summary["output_tokens_per_s"]
    return {
        "load": {"kind": "closed_loop", "concurrency": concurrency},
        "summary": summary,
        "steady": dict(found),
        "client": {
            "cpu_shares": [0.21, 0.3],
            "loop_lag_ms": {"p50": 0.2, "p99": 1.4, "max": 3.0},
            "send_late_ms": None,
            "flags": [],
        },
        "counters": {"num_preemptions": 3, "prefix_hit_tokens": 1200},
        "telemetry": {"gpu_utilization": None, "reason": "NVML is not installed"},
        "warnings": warnings_of(summary),
        "series": [[t / 2, rate * min(1.0, t / 6) * (0.95 + 0.1 * (t % 2)), concurrency] for t in range(40)],
        **changes,
    }


def online_record(levels: Sequence[Mapping[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    return base_record("online", levels=list(levels if levels is not None else [level(16, outcomes())]), **changes)
