"""What batching gives: one table of batch sizes, static against continuous batching, on the same requests.

Static batching sends a batch, waits for its longest answer, and sends the next. Continuous batching replaces each
sequence when it ends. Both run with the same `max_num_seqs`, on the same started engine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.bench.engines import Engine, EngineFailure, OfflineRun, RunningEngine
from headrace.bench.offline import round_of, warm_up_of
from headrace.bench.record import new_record
from headrace.bench.workloads import Workload

BATCH_SIZES = (1, 16, 64)
BATCHES = 3  # of the largest kind of work at each size: enough that continuous batching reaches its steady state

OnRow = Callable[[dict[str, Any]], None]


def measure_batching(
    engine: Engine,
    workload: Workload,
    settings: Mapping[str, Any],
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    num_rounds: int = 3,
    commit: str | None = None,
    on_row: OnRow | None = None,
) -> dict[str, Any]:
    """Measure each batch size, static and continuous in turn. A size that does not start is a row with its failure."""
    record: dict[str, Any] | None = None
    rows: list[dict[str, Any]] = []
    for size in batch_sizes:
        try:
            with engine.start({**settings, "max_num_seqs": size}, serves=False) as running:
                record = record or new_record("batching", running, workload, commit)
                measured = _rows_of(running, workload.first(max(BATCHES, BATCHES * size)), size, num_rounds)
        except EngineFailure as error:
            measured = [{"batch_size": size, "failure": {"kind": error.kind, "message": str(error)}}]
        rows += measured
        for row in measured:
            if on_row is not None:
                on_row(row)
    if record is None:
        raise EngineFailure("crash", f"no batch size could be started: {rows[0]['failure']['message']}")
    return record | {"rows": with_gains(rows), "load": {"kind": "batching"}}


def with_gains(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with the rate of each relative to one sequence at a time."""
    base = next(
        (row["output_tokens_per_s"] for row in rows if row.get("batch_size") == 1 and "failure" not in row), None
    )
    return [
        row if base is None or "failure" in row else row | {"gain": row["output_tokens_per_s"] / base} for row in rows
    ]


def _rows_of(running: RunningEngine, workload: Workload, size: int, num_rounds: int) -> list[dict[str, Any]]:
    running.run_offline(warm_up_of(workload))
    kinds = ("continuous",) if size == 1 else ("static", "continuous")
    rounds: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(num_rounds):
        for kind in kinds:  # in turn: a machine that slows down slows both
            running.reset_prefix_cache()
            run = running.run_offline(workload) if kind == "continuous" else _static(running, workload, size)
            rounds[kind].append(round_of(run, workload))
    return [
        {
            "batch_size": size,
            "batching": "one at a time" if size == 1 else kind,
            "num_requests": len(workload.requests),
            "output_tokens_per_s": statistics.median(each["output_tokens_per_s"] for each in rounds[kind]),
            "rounds": [each["seconds"] for each in rounds[kind]],
        }
        for kind in kinds
    ]


def _static(running: RunningEngine, workload: Workload, size: int) -> OfflineRun:
    runs = [
        running.run_offline(replace(workload, requests=workload.requests[first : first + size]))
        for first in range(0, len(workload.requests), size)
    ]
    return OfflineRun(
        seconds=sum(run.seconds for run in runs),
        output_lens=[length for run in runs for length in run.output_lens],
        prompt_lens=[length for run in runs for length in run.prompt_lens],
    )
