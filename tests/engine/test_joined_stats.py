"""Counters of several engines in total."""

from __future__ import annotations

from dataclasses import fields

from headrace.engine.core import EngineStats
from headrace.engine.joined_stats import summed_stats
from headrace.histogram import HistogramCounts
from headrace.sched import SchedulerStats

SIZES = ("block_size", "host_block_bytes")  # the same in all engines


def stats_of(seed: int, *, is_filled: bool = True) -> EngineStats:
    """Every field has a value of its own."""
    counts = HistogramCounts((seed, 1, 2), 0.5 * seed) if is_filled else HistogramCounts()
    values = {
        each.name: counts if isinstance(getattr(SchedulerStats(), each.name), HistogramCounts) else seed + place
        for place, each in enumerate(fields(SchedulerStats))
    }
    return EngineStats(SchedulerStats(**values), seed, 2 * seed, 3 * seed, 4 * seed, counts, counts, 100 + seed)


def test_engines_side_by_side_are_summed_field_by_field() -> None:
    each = [stats_of(1), stats_of(2, is_filled=False), stats_of(4)]
    total = summed_stats(each)
    for place, field in enumerate(fields(SchedulerStats)):
        value = getattr(total.scheduler, field.name)
        if isinstance(value, HistogramCounts):
            assert value == HistogramCounts((5, 2, 4), 2.5)
        else:
            assert value == (4 + place if field.name in SIZES else 7 + 3 * place), field.name
    assert (total.host_seconds, total.wait_seconds) == (7, 14)
    assert (total.steady_host_seconds, total.num_steady_steps) == (21, 28)
    assert total.step_seconds == total.step_host_seconds == HistogramCounts((5, 2, 4), 2.5)
    assert total.started_at == 104


def test_histograms_that_were_never_filled_stay_empty() -> None:
    total = summed_stats([stats_of(1, is_filled=False), stats_of(2, is_filled=False)])
    assert total.step_seconds == total.scheduler.token_gaps == HistogramCounts()
