"""The load levels of an online record: their names, the figures that count, and their request rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.bench.outcomes import Outcome
from headrace.bench.record import read_rows
from headrace.bench.values import found, is_number, number, plain

LATENCIES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_ms": "inter-token latency",
    "e2e_ms": "end-to-end latency",
}
UNANSWERED = {"num_refused": "refused (429, 503)", "num_failed": "failed", "num_timeout": "timed out"}


def levels_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The levels; of a record without levels, the record itself as one."""
    levels = record.get("levels")
    return list(levels) if levels else [dict(record)] if "summary" in record else []


def load_label(load: Any) -> str:
    """`16 concurrent`, `8 requests/s (Poisson)`, or what the load says of itself."""
    if not isinstance(load, Mapping):
        return "the whole load"
    rate = load.get("rate")
    if rate == "inf":
        return "all at once" + _limited(load)
    if is_number(rate):
        burstiness = load.get("burstiness", 1.0)
        arrivals = {1.0: "Poisson", "inf": "constant"}.get(burstiness, f"burstiness {plain(burstiness)}")
        return f"{number(rate)} requests/s ({arrivals})" + _limited(load)
    if is_number(load.get("concurrency")):
        return f"{load['concurrency']:,} concurrent"
    if load.get("kind") == "trace" and load.get("speed", 1.0) != 1.0:
        return f"trace, {plain(load['speed'])} times as fast" + _limited(load)
    return str(load.get("name") or load.get("kind") or "the whole load") + _limited(load)


def _limited(load: Mapping[str, Any]) -> str:
    most = load.get("max_concurrency")
    return f", at most {most:,} concurrent" if is_number(most) else ""


def load_amount(load: Any) -> float | None:
    """What a curve over levels has on its x axis: concurrency, or requests/s of an open loop."""
    for key in ("rate", "concurrency"):
        if is_number(found(load, key)):
            return float(found(load, key))
    return None


def figures_of(level: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of the steady window where one was found, otherwise that of the whole run."""
    return dict(found(level, "steady", "summary") or level.get("summary") or {})


def basis_of(level: Mapping[str, Any]) -> str:
    """Which part of the run the figures are from."""
    steady = level.get("steady")
    if found(steady, "summary"):
        return f"{number(float(steady['start_s']))} to {number(float(steady['end_s']))} s"  # type: ignore[index]
    reason = found(steady, "reason")
    return f"whole run: {reason}" if reason else "whole run"


def rows_of(record: Mapping[str, Any], directory: Path | None) -> list[list[Outcome] | None]:
    """The request rows of each level, if they were kept: named by the level, or by a record of one level."""
    levels = levels_of(record)
    if directory is None:
        return [None] * len(levels)
    rows = [read_rows(dict(level), directory) for level in levels]
    if len(levels) == 1 and rows[0] is None:
        rows = [read_rows(dict(record), directory)]
    return rows


def steady_rows(level: Mapping[str, Any], rows: list[Outcome]) -> list[Outcome]:
    """The rows that the level's figures are from: those that ended within the steady window."""
    steady = level.get("steady")
    if not found(steady, "summary"):
        return rows
    return [row for row in rows if steady["start_s"] <= row.end_s <= steady["end_s"]]  # type: ignore[index]
