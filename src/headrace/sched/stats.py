"""The scheduler's counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.histogram import HistogramCounts
from headrace.kv import TierStats

BATCH_TOKENS_BOUNDS = (1, 8, *(2**power for power in range(4, 15)))  # tokens of a step: 1, 8, 16, 32 ... 16384
TOKEN_GAP_BOUNDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start, and current values. Owned by the scheduler; others take a copy."""

    num_steps: int = 0
    num_batched_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_recomputed_tokens: int = 0  # tokens computed again after a preemption
    num_prefix_queried_tokens: int = 0  # prompt tokens looked up in the prefix cache
    num_prefix_hit_tokens: int = 0  # those that were found
    num_tier_queried_tokens: int = 0  # prompt tokens that were not found in the pool
    num_tier_hit_tokens: int = 0  # of the found ones, those that came from the host tier or the disk
    num_evicted_tokens: int = 0  # of findable blocks that were evicted from the pool
    num_drafts: int = 0  # how often a sequence had drafts in a step
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # of the drafted ones
    accepted_by_position: HistogramCounts = field(default_factory=HistogramCounts)  # the first draft of a step first
    max_blocks_held: int = 0
    sum_blocks_held: int = 0  # over all steps
    sum_unused_positions: int = 0  # over all steps: positions in held blocks without a token
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_blocks_held: int = 0
    num_blocks_idle: int = 0
    num_host_blocks: int = 0  # places of the host tier
    num_host_blocks_used: int = 0
    host_block_bytes: int = 0  # of one place
    block_size: int = 0
    batch_tokens: HistogramCounts = field(default_factory=HistogramCounts)  # per step, by BATCH_TOKENS_BOUNDS
    iteration_tokens: HistogramCounts = field(default_factory=HistogramCounts)  # prompt and generated
    token_gaps: HistogramCounts = field(default_factory=HistogramCounts)  # seconds, by TOKEN_GAP_BOUNDS
    tiers: TierStats = field(default_factory=TierStats)

    @property
    def prefix_hit_share(self) -> float:
        return self.num_prefix_hit_tokens / max(1, self.num_prefix_queried_tokens)

    @property
    def kv_use(self) -> float:
        return self.num_blocks_held / max(1, self.num_blocks)

    @property
    def max_kv_use(self) -> float:
        return self.max_blocks_held / max(1, self.num_blocks)

    @property
    def kv_waste(self) -> float:
        """Share of the positions in held blocks that held no token, over all steps."""
        return self.sum_unused_positions / max(1, self.sum_blocks_held * self.block_size)

    @property
    def mean_batched_tokens(self) -> float:
        return self.num_batched_tokens / max(1, self.num_steps)
