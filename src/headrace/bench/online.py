"""`bench` online: loads against a server, one level after the other: a throughput-latency curve.

Each level gets requests of its own, so that no level finds the prompts of an earlier one in the prefix cache, and the
cache is emptied where the engine can. Figures are given for the whole level and for its steady window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from headrace.bench.engines import EngineFailure, RunningEngine
from headrace.bench.load import ClosedLoop, Load, LoadResult, OpenLoop, Progress, run_load
from headrace.bench.outcomes import Outcome
from headrace.bench.record import new_record
from headrace.bench.slo import Slo
from headrace.bench.steady import steady_window, summarize_window
from headrace.bench.summary import summarize, warnings_of
from headrace.bench.telemetry import Telemetry
from headrace.bench.workloads import Workload

WARM_UP_REQUESTS, WARM_UP_CONCURRENCY, WARM_UP_TOKENS = 16, 8, 16
MIN_REQUESTS, REQUESTS_PER_CLIENT = 64, 4  # of a closed loop whose length is not given
MIN_PROMPTS, PROMPTS_PER_CLIENT = 4096, 32  # different ones, of a closed loop that is limited by time
ARRIVALS_MARGIN = 1.2  # of an open loop that is limited by time: arrivals are random
SERIES_POINTS = 120
MIN_BIN_S = 0.25

REPEATED = (
    "prompts repeat, so that the prefix cache may have answered for some prefills: give more of them (--num-requests, "
    "or a larger file), or turn prefix caching off"
)

OnLevel = Callable[[dict[str, Any]], None]
OnProgress = Callable[[Load, Progress], None]


@dataclass(frozen=True, kw_only=True)
class Client:
    """How requests are sent, whatever the load."""

    headers: Mapping[str, str] | None = None
    timeout_s: float = 600.0
    num_processes: int | None = None  # None: by concurrency and cores
    compatibility: str = "vllm"


@dataclass(frozen=True)
class Measured:
    """A record, and the request rows of its levels."""

    record: dict[str, Any]
    rows: list[list[Outcome]]
    was_interrupted: bool = False


def measure_online(
    engine: RunningEngine,
    workload: Workload,
    loads: Sequence[Load],
    *,
    slo: Slo | None = None,
    client: Client | None = None,
    warms_up: bool = True,
    commit: str | None = None,
    on_level: OnLevel | None = None,
    on_progress: OnProgress | None = None,
) -> Measured:
    """Run the levels. A server that dies, or Ctrl-C, ends the run; what was measured is kept."""
    client = client or Client()
    record = new_record("online", engine, workload, commit)
    record["load"] = {
        "levels": [load.as_json() for load in loads],
        "warms_up": warms_up,
        "timeout_s": client.timeout_s,
        "compatibility": client.compatibility,
    }
    levels: list[dict[str, Any]] = []
    rows: list[list[Outcome]] = []
    record["levels"] = levels
    if warms_up:
        _send(engine, warm_up_of(workload), ClosedLoop(concurrency=WARM_UP_CONCURRENCY), client, None)
    first, was_interrupted = 0, False
    for load in loads:
        asked, wraps = part_of(workload, load, first)
        first += len(asked.requests)
        can_reset = engine.reset_prefix_cache()
        before = _counters(engine)
        with Telemetry(engine.pids) as telemetry:
            result = _send(engine, asked, load, client, on_progress)
        level = level_of(load, result, slo)
        level |= {"counters": _difference(before, _counters(engine)), "telemetry": telemetry.summary()}
        if (wraps and not can_reset) or len(asked.requests) > len(workload.requests):
            level["warnings"].append(REPEATED)
        levels.append(level)
        rows.append(result.outcomes)
        if on_level is not None:
            on_level(level)
        if result.was_interrupted or result.server_died:
            was_interrupted = result.was_interrupted
            if result.server_died:
                record["failure"] = {"kind": "crash", "message": "the server died", "log_tail": engine.log_tail()}
            break
    record["summary"] = best_level(levels)
    return Measured(record, rows, was_interrupted)


def part_of(workload: Workload, load: Load, first: int) -> tuple[Workload, bool]:
    """The requests of a level, and whether some were used before. A trace takes all."""
    count = num_requests_of(load)
    if count is None:
        return workload, first > 0
    total = len(workload.requests)
    picked = [workload.requests[(first + i) % total] for i in range(count)]
    return replace(workload, requests=picked), first + count > total


def num_requests_of(load: Load) -> int | None:
    """How many different requests a level needs; None for a trace, which takes what is there."""
    if load.num_requests is not None:
        return load.num_requests
    if isinstance(load, ClosedLoop):
        if load.seconds is None:
            return max(MIN_REQUESTS, REQUESTS_PER_CLIENT * load.concurrency)
        return max(MIN_PROMPTS, PROMPTS_PER_CLIENT * load.concurrency)
    if isinstance(load, OpenLoop) and load.seconds is not None:
        return math.ceil(ARRIVALS_MARGIN * load.rate * load.seconds)
    return None


def warm_up_of(workload: Workload) -> Workload:
    """The last requests of the workload with short answers, and with other prompts: a server whose prefix cache cannot
    be emptied must not find a measured prompt in it."""
    few = workload.requests[-WARM_UP_REQUESTS:]
    short = [
        msgspec.structs.replace(
            request,
            output_len=min(WARM_UP_TOKENS, request.output_len),
            due_s=None,
            prompt=None if request.prompt is None else _turned(request.prompt),
            messages=None if request.messages is None else [_other_message(each) for each in request.messages],
        )
        for request in few
    ]
    return replace(workload, requests=short)


def _other_message(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return message | {"content": _turned(content)} if isinstance(content, str) else message


def _turned(prompt: Any) -> Any:  # text or token ids, the first one at the end
    return prompt[1:] + prompt[:1]


def level_of(load: Load, result: LoadResult, slo: Slo | None) -> dict[str, Any]:
    """The figures of one level."""
    summary = summarize(result.outcomes, result.seconds, slo)
    window = steady_window(result.outcomes)
    steady = window.as_json()
    if window.is_steady:
        steady["summary"] = summarize_window(result.outcomes, window, slo)
    return {
        "load": load.as_json(),
        "summary": summary,
        "steady": steady,
        "client": result.client.as_json(),
        "series": series_of(result.outcomes, result.seconds),
        "was_interrupted": result.was_interrupted,
        "warnings": [*result.warnings, *result.client.flags, *warnings_of(summary)],
    }


def series_of(outcomes: Sequence[Outcome], seconds: float) -> list[list[float]]:
    """[time, output tokens/s, requests in flight] in bins, for a plot."""
    if seconds <= 0:
        return []
    width = max(MIN_BIN_S, seconds / SERIES_POINTS)
    num_bins = max(1, round(seconds / width))
    width = seconds / num_bins
    tokens, running = [0.0] * num_bins, [0] * num_bins
    for outcome in outcomes:
        if not outcome.is_ok:
            continue
        times = outcome.chunk_s or [outcome.end_s]
        for at in times:
            tokens[min(num_bins - 1, int(at / width))] += outcome.num_output_tokens / len(times)
        for index in range(int(outcome.sent_s / width), min(num_bins, int(outcome.end_s / width) + 1)):
            running[index] += 1
    return [[(i + 0.5) * width, tokens[i] / width, running[i]] for i in range(num_bins)]


def best_level(levels: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The level with the most goodput, or output tokens/s where no SLO is given."""
    if not levels:
        return None

    def rate(level: dict[str, Any]) -> float:
        slo = level["summary"].get("slo")
        return float(slo["goodput_requests_per_s"] if slo else level["summary"]["output_tokens_per_s"])

    best = max(levels, key=rate)
    return {"load": best["load"], **best["summary"]}


def _send(
    engine: RunningEngine, workload: Workload, load: Load, client: Client, on_progress: OnProgress | None
) -> LoadResult:
    if engine.address is None:
        raise EngineFailure("unsupported", f"{engine.name} was started in process: it has no address for a load")
    return run_load(
        engine.address,
        workload,
        load,
        model_name=engine.model_name,
        headers=client.headers,
        timeout_s=client.timeout_s,
        num_processes=client.num_processes,
        compatibility=client.compatibility,  # type: ignore[arg-type]
        on_progress=None if on_progress is None else lambda progress: on_progress(load, progress),
    )


def _counters(engine: RunningEngine) -> dict[str, float]:
    try:
        return engine.counters()
    except EngineFailure:
        return {}  # the level says what happened to the server


def _difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in after.items() if name in before}


def loads_of(
    *,
    concurrency: Sequence[int] = (),
    rates: Sequence[float] = (),
    burstiness: float = 1.0,
    num_requests: int | None = None,
    seconds: float | None = None,
    max_concurrency: int | None = None,
    seed: int = 0,
) -> list[Load]:
    """The levels of a curve."""
    closed = [ClosedLoop(concurrency=each, num_requests=num_requests, seconds=seconds) for each in concurrency]
    opened = [
        OpenLoop(
            rate=rate,
            burstiness=burstiness,
            num_requests=num_requests,
            seconds=seconds,
            max_concurrency=max_concurrency,
            seed=seed,
        )
        for rate in rates
    ]
    return [*closed, *opened]
