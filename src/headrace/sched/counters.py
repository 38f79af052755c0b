"""Counts what the scheduler does."""

from __future__ import annotations

from dataclasses import replace

from headrace.histogram import Histogram
from headrace.kv import BlockTables, TierStats
from headrace.sched.limits import SchedulerLimits
from headrace.sched.placement import Placed
from headrace.sched.sequence import Sequence
from headrace.sched.slots import SlotTable
from headrace.sched.stats import BATCH_TOKENS_BOUNDS, SchedulerStats
from headrace.sched.token_gaps import TokenGaps
from headrace.steps import StepPlan


class Counters:
    """Owned by the scheduler. `stats` is counted further; others take a `snapshot`."""

    def __init__(self, limits: SchedulerLimits, tables: BlockTables, slots: SlotTable) -> None:
        self._tables = tables
        self._slots = slots
        self.stats = SchedulerStats(
            num_blocks=limits.num_blocks,
            num_host_blocks=limits.num_host_blocks,
            host_block_bytes=limits.host_block_bytes,
            block_size=limits.block_size,
        )
        self._batch_tokens = Histogram(BATCH_TOKENS_BOUNDS)
        self._iteration_tokens = Histogram(BATCH_TOKENS_BOUNDS)

    def snapshot(self, token_gaps: TokenGaps, *, num_waiting: int) -> SchedulerStats:
        pool, tiers = self._tables.pool, self._tables.tiers
        return replace(
            self.stats,
            num_running=self._slots.num_running,
            num_waiting=num_waiting,
            num_blocks_held=pool.num_held,
            num_blocks_idle=pool.num_idle,
            batch_tokens=self._batch_tokens.snapshot(),
            iteration_tokens=self._iteration_tokens.snapshot(),
            token_gaps=token_gaps.histogram.snapshot(),
            num_evicted_tokens=pool.num_evicted * self.stats.block_size,
            tiers=TierStats() if tiers is None else tiers.stats,
            num_host_blocks_used=0 if tiers is None else tiers.num_places_used,
        )

    def planned(self, plan: StepPlan, num_prompts_completed: int) -> None:
        stats, num_held = self.stats, self._tables.pool.num_held
        stats.num_steps += 1
        stats.num_batched_tokens += plan.num_batched_tokens
        self._batch_tokens.observe(plan.num_batched_tokens)
        self._iteration_tokens.observe(plan.num_batched_tokens + num_prompts_completed)
        stats.max_blocks_held = max(stats.max_blocks_held, num_held)
        stats.sum_blocks_held += num_held
        stats.sum_unused_positions += self._slots.num_unused_positions()

    def started(self, sequence: Sequence, placed: Placed, *, is_first: bool) -> None:
        """`is_first`: it has not run before, so its prompt counts."""
        stats, num_cached = self.stats, placed.num_cached
        if not is_first:
            stats.num_recomputed_tokens += len(sequence.token_ids) - num_cached
        elif sequence.parent is None:  # a request's prompt counts once
            stats.num_prompt_tokens += sequence.prompt_len
            stats.num_prefix_queried_tokens += sequence.prompt_len
            stats.num_prefix_hit_tokens += num_cached
            stats.num_tier_queried_tokens += sequence.prompt_len - (num_cached - placed.num_loaded)
            stats.num_tier_hit_tokens += placed.num_loaded
