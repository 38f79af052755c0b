"""`bench` offline: a workload through an engine in process, all requests at once, in rounds.

A round starts with an empty prefix cache. The warm-up, which compiles kernels, is not timed. The record has every
round; its summary is of the median round, and names the best.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from headrace.bench.engines import EngineFailure, OfflineRun, RunningEngine
from headrace.bench.record import new_record
from headrace.bench.telemetry import Telemetry
from headrace.bench.workloads import Workload

WARM_UP_REQUESTS = 256
WARM_UP_TOKENS = 4

ONE_ROUND = "one round: the spread between rounds is unknown"

OnRound = Callable[[int, dict[str, Any]], None]


def measure_offline(
    engine: RunningEngine,
    workload: Workload,
    *,
    num_rounds: int = 3,
    commit: str | None = None,
    on_round: OnRound | None = None,
) -> dict[str, Any]:
    """Run the workload several times and return its record. What was measured before a failure is kept."""
    record = new_record("offline", engine, workload, commit)
    record["load"] = {"kind": "offline"}
    engine.run_offline(warm_up_of(workload))
    rounds: list[dict[str, Any]] = []
    for number in range(1, num_rounds + 1):
        can_reset = engine.reset_prefix_cache()
        with Telemetry(engine.pids) as telemetry:
            try:
                run = engine.run_offline(workload)
            except EngineFailure as error:
                record["failure"] = {"kind": error.kind, "message": str(error), "log_tail": error.log_tail}
                break
        rounds.append(
            round_of(run, workload) | {"telemetry": telemetry.summary(), "starts_with_empty_cache": can_reset}
        )
        if on_round is not None:
            on_round(number, rounds[-1])
    record |= {"rounds": rounds, "summary": summary_of(rounds), "warnings": warnings_of(rounds, workload)}
    if rounds:
        record["telemetry"] = rounds[-1]["telemetry"]
    return record


def warm_up_of(workload: Workload) -> Workload:
    """A few short answers of the workload."""
    few = workload.requests[:WARM_UP_REQUESTS]
    short = [msgspec.structs.replace(r, output_len=min(WARM_UP_TOKENS, r.output_len)) for r in few]
    return replace(workload, requests=short)


def round_of(run: OfflineRun, workload: Workload) -> dict[str, Any]:
    """Figures of one run. Raises EngineFailure if an answer does not have the length that it must have."""
    num_output, num_prompt = sum(run.output_lens), sum(run.prompt_lens)
    if workload.spec.ends == "exact":
        wanted = [request.output_len for request in workload.requests]
        wrong = sum(got != length for got, length in zip(run.output_lens, wanted, strict=True))
        if wrong:
            raise EngineFailure("crash", f"{wrong:,} of {len(wanted):,} answers do not have the tokens asked for")
    return {
        "seconds": run.seconds,
        "requests_per_s": len(run.output_lens) / run.seconds,
        "output_tokens_per_s": num_output / run.seconds,
        "total_tokens_per_s": (num_output + num_prompt) / run.seconds,
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "counters": dict(run.counters),
    }


def summary_of(rounds: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The median round (of an even number, the slower of the two in the middle), with the best and the spread."""
    if not rounds:
        return None
    seconds = sorted(each["seconds"] for each in rounds)
    median = statistics.median_high(seconds)
    chosen = next(each for each in rounds if each["seconds"] == median)
    return {
        **{name: value for name, value in chosen.items() if name != "telemetry"},
        "num_rounds": len(rounds),
        "best_seconds": seconds[0],
        "worst_seconds": seconds[-1],
    }


def warnings_of(rounds: Sequence[dict[str, Any]], workload: Workload) -> list[str]:
    warnings = []
    if any(not each["starts_with_empty_cache"] for each in rounds[1:]):
        warnings.append("the prefix cache could not be emptied between rounds: later rounds may find earlier prompts")
    if len(rounds) == 1:
        warnings.append(ONE_ROUND)
    if workload.spec.ends == "exact":
        warnings.append("every length is known in advance (ends=exact): memory pressure shows less than in real use")
    return warnings
