"""Adds up the counters of engines that ran one after the other, or that run side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from headrace.engine.core import EngineStats
from headrace.histogram import HistogramCounts
from headrace.sched import SchedulerStats

# Gauges: the value of the last engine counts.
_GAUGES = frozenset(
    {"num_running", "num_waiting", "num_blocks", "num_blocks_held", "num_blocks_idle", "block_size"}
    | {"num_host_blocks", "num_host_blocks_used", "host_block_bytes"}
)
_SCHEDULER_FIELDS = tuple(each.name for each in fields(SchedulerStats))


def joined_stats(before: EngineStats | None, now: EngineStats) -> EngineStats:
    """Counters are summed; gauges are those of the last engine."""
    if before is None:
        return now
    return EngineStats(
        _joined_scheduler(before.scheduler, now.scheduler),
        before.host_seconds + now.host_seconds,
        before.wait_seconds + now.wait_seconds,
        before.steady_host_seconds + now.steady_host_seconds,
        before.num_steady_steps + now.num_steady_steps,
        _joined_counts(before.step_seconds, now.step_seconds),
        _joined_counts(before.step_host_seconds, now.step_host_seconds),
        now.started_at,
    )


def summed_stats(each: Sequence[EngineStats]) -> EngineStats:
    """The sum over engines that run side by side, of which there may be many. The peak of the KV cache is the sum of
    their peaks."""
    if len(each) == 1:
        return each[0]
    schedulers = [stats.scheduler for stats in each]
    return EngineStats(
        SchedulerStats(**{name: _sum_of(name, schedulers) for name in _SCHEDULER_FIELDS}),
        sum(stats.host_seconds for stats in each),
        sum(stats.wait_seconds for stats in each),
        sum(stats.steady_host_seconds for stats in each),
        sum(stats.num_steady_steps for stats in each),
        _summed_counts([stats.step_seconds for stats in each]),
        _summed_counts([stats.step_host_seconds for stats in each]),
        each[-1].started_at,
    )


def _sum_of(name: str, schedulers: Sequence[SchedulerStats]) -> Any:
    values = [getattr(stats, name) for stats in schedulers]
    if isinstance(values[0], HistogramCounts):
        return _summed_counts(values)
    return max(values) if name in ("block_size", "host_block_bytes") else sum(values[1:], start=values[0])


def _summed_counts(each: Sequence[HistogramCounts]) -> HistogramCounts:
    filled = [histogram for histogram in each if histogram.counts]
    if not filled:
        return each[-1]
    counts = zip(*(histogram.counts for histogram in filled), strict=True)
    return HistogramCounts(tuple(map(sum, counts)), sum(histogram.total for histogram in filled))


def _joined_scheduler(before: SchedulerStats, now: SchedulerStats) -> SchedulerStats:
    changes: dict[str, Any] = {}
    for each in fields(SchedulerStats):
        old, new = getattr(before, each.name), getattr(now, each.name)
        if isinstance(new, HistogramCounts):
            changes[each.name] = _joined_counts(old, new)
        elif each.name == "max_blocks_held":
            changes[each.name] = max(old, new)
        elif each.name not in _GAUGES:
            changes[each.name] = old + new
    return replace(now, **changes)


def _joined_counts(before: HistogramCounts, now: HistogramCounts) -> HistogramCounts:
    if not before.counts or not now.counts:
        return before if before.counts else now
    counts = tuple(old + new for old, new in zip(before.counts, now.counts, strict=True))
    return HistogramCounts(counts, before.total + now.total)
