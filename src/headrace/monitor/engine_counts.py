"""Turns snapshots of engine counters into monotonic Prometheus counters, across engine restarts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import time

from headrace.engine.core import EngineStats
from headrace.histogram import HistogramCounts
from headrace.monitor import table
from headrace.monitor.series import Series
from headrace.monitor.store import Store
from headrace.sched import SchedulerStats

RATE_WINDOW_S = 10.0
RATE_SAMPLE_S = 1.0

_GAUGES = (
    *(table.RUNNING, table.WAITING, table.WAITING_BY_REASON, table.KV_USE, table.TIER_USE),
    *(table.PROMPT_RATE, table.GENERATION_RATE, table.SLEEP_STATE, table.LORA_INFO),
)
_NOTHING = EngineStats(SchedulerStats(), 0.0, 0.0)  # a freshly started engine
Counts = dict[tuple[Series, *tuple[str, ...]], float]
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by level


class EngineCounts:
    """Adds what grew since the last snapshot to the store. One caller at a time."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._last = _NOTHING
        self._rates = TokenRates(clock())
        self.sleep_level = 0  # 0: awake
        for series, *labels in _counts_of(_NOTHING):
            store.add(series, 0.0, *labels)

    def take(self, stats: EngineStats | None) -> None:
        """Take in a snapshot; None means that no engine responds."""
        self._store.set(table.ENGINE_UP, float(stats is not None))
        if stats is None:
            self._store.clear(*_GAUGES)
            if self.sleep_level:  # it was put to sleep: it is neither up nor down
                self._store.clear(table.ENGINE_UP)
                self._set_sleep_state(self.sleep_level)
            return
        self._add_growth(stats)
        self._set_gauges(stats)
        self._last = stats

    def _set_sleep_state(self, level: int) -> None:
        for each, state in enumerate(SLEEP_STATES):
            self._store.set(table.SLEEP_STATE, float(each == level), state)

    def _add_growth(self, stats: EngineStats) -> None:
        before = self._last if _is_same_engine(self._last, stats) else _NOTHING
        old, new = _counts_of(before), _counts_of(stats)
        for key, value in new.items():
            series, *labels = key
            self._store.add(series, max(0.0, value - old.get(key, 0.0)), *labels)
        earlier = _histograms_of(before)
        for series, counts in _histograms_of(stats).items():
            self._store.add_counts(series, _growth(earlier[series], counts))
        self._rates.grow(
            new[table.PROMPT_TOKENS,] - old[table.PROMPT_TOKENS,],
            new[table.GENERATED_TOKENS,] - old[table.GENERATED_TOKENS,],
        )

    def _set_gauges(self, stats: EngineStats) -> None:
        store, scheduler = self._store, stats.scheduler
        store.set(table.RUNNING, scheduler.num_running)
        store.set(table.WAITING, scheduler.num_waiting)
        store.set(table.WAITING_BY_REASON, scheduler.num_waiting, "capacity")
        store.set(table.WAITING_BY_REASON, 0.0, "deferred")
        store.set(table.KV_USE, scheduler.kv_use)
        store.set(table.TIER_USE, scheduler.num_host_blocks_used / max(1, scheduler.num_host_blocks))
        self._set_sleep_state(0)
        if (adapters := stats.adapters) is not None:
            store.clear(table.LORA_INFO)
            names = (",".join(adapters.running), ",".join(adapters.waiting))
            store.set(table.LORA_INFO, time(), str(adapters.max_loras), *names)
        prompt_rate, generation_rate = self._rates.rates(self._clock())
        store.set(table.PROMPT_RATE, prompt_rate)
        store.set(table.GENERATION_RATE, generation_rate)


class TokenRates:
    """Tokens per second over the last ten seconds, or since the scrape before them, however often others scrape."""

    def __init__(self, now: float) -> None:
        self._num_prompt = 0.0
        self._num_generated = 0.0
        self._samples = deque([(now, 0.0, 0.0)])

    def grow(self, num_prompt: float, num_generated: float) -> None:
        self._num_prompt += num_prompt
        self._num_generated += num_generated

    def rates(self, now: float) -> tuple[float, float]:
        samples = self._samples
        while len(samples) > 1 and samples[1][0] <= now - RATE_WINDOW_S:
            samples.popleft()
        since, num_prompt, num_generated = samples[0]
        if now - samples[-1][0] >= RATE_SAMPLE_S:
            samples.append((now, self._num_prompt, self._num_generated))
        seconds = now - since
        if seconds <= 0:
            return 0.0, 0.0
        return (self._num_prompt - num_prompt) / seconds, (self._num_generated - num_generated) / seconds


def _is_same_engine(before: EngineStats, after: EngineStats) -> bool:
    return before.started_at == after.started_at and before.scheduler.num_steps <= after.scheduler.num_steps


def _counts_of_tiers(scheduler: SchedulerStats) -> Counts:
    tiers, num_bytes = scheduler.tiers, scheduler.host_block_bytes
    return {
        (table.TIER_QUERIES,): scheduler.num_tier_queried_tokens if scheduler.num_host_blocks else 0,
        (table.TIER_HITS,): scheduler.num_tier_hit_tokens,
        (table.TIER_BLOCKS_LOADED, "host"): tiers.num_loaded - tiers.num_disk_hits,
        (table.TIER_BLOCKS_LOADED, "disk"): tiers.num_disk_hits,
        (table.TIER_BYTES, "GPU_to_CPU"): tiers.num_stored * num_bytes,
        (table.TIER_BYTES, "CPU_to_GPU"): tiers.num_loaded * num_bytes,
        (table.TIER_BYTES, "CPU_to_disk"): tiers.num_written * num_bytes,
        (table.TIER_BYTES, "disk_to_CPU"): tiers.num_read * num_bytes,
        (table.TIER_DROPPED, "host_busy"): tiers.num_dropped,
        (table.TIER_DROPPED, "disk_write"): tiers.num_unwritten,
        (table.TIER_DROPPED, "disk_read"): tiers.num_unreadable,
    }


def _counts_of(stats: EngineStats) -> Counts:
    """All counters, by series and label values."""
    scheduler = stats.scheduler
    positions = enumerate(scheduler.accepted_by_position.counts)
    by_position: Counts = {(table.ACCEPTED_BY_POSITION, str(position)): count for position, count in positions}
    return (
        by_position
        | _counts_of_tiers(scheduler)
        | {
            (table.STEPS,): scheduler.num_steps,
            (table.PREFIX_QUERIES,): scheduler.num_prefix_queried_tokens,
            (table.PREFIX_HITS,): scheduler.num_prefix_hit_tokens,
            (table.PREEMPTIONS,): scheduler.num_preemptions,
            (table.PROMPT_TOKENS,): scheduler.num_prompt_tokens,
            (table.PROMPT_TOKENS_BY_SOURCE, "local_compute"): scheduler.num_prompt_tokens
            - scheduler.num_prefix_hit_tokens,
            (table.PROMPT_TOKENS_BY_SOURCE, "local_cache_hit"): (
                scheduler.num_prefix_hit_tokens - scheduler.num_tier_hit_tokens
            ),
            (table.PROMPT_TOKENS_BY_SOURCE, "external_kv_transfer"): scheduler.num_tier_hit_tokens,
            (table.EVICTED_TOKENS,): scheduler.num_evicted_tokens,
            (table.GENERATED_TOKENS,): scheduler.num_generated_tokens,
            (table.RECOMPUTED_TOKENS,): scheduler.num_recomputed_tokens,
            (table.DRAFTS,): scheduler.num_drafts,
            (table.DRAFT_TOKENS,): scheduler.num_draft_tokens,
            (table.ACCEPTED_TOKENS,): scheduler.num_accepted_tokens,
            (table.BUSY_SECONDS, "host"): stats.host_seconds,
            (table.BUSY_SECONDS, "wait"): stats.wait_seconds,
        }
    )


def _histograms_of(stats: EngineStats) -> dict[Series, HistogramCounts]:
    return {
        table.TOKEN_GAP_SECONDS: stats.scheduler.token_gaps,
        table.BATCH_TOKENS: stats.scheduler.batch_tokens,
        table.ITERATION_TOKENS: stats.scheduler.iteration_tokens,
        table.STEP_SECONDS: stats.step_seconds,
        table.STEP_HOST_SECONDS: stats.step_host_seconds,
    }


def _growth(before: HistogramCounts, after: HistogramCounts) -> HistogramCounts:
    if not before.counts:
        return after
    counts = tuple(new - old for new, old in zip(after.counts, before.counts, strict=True))
    return HistogramCounts(counts, after.total - before.total)
