"""Finds KV-cache blocks for a sequence that is to start: shared ones by prefix or by fork, new ones for the rest.

prefix hit   [b0 b1 b2]            blocks that hold the first tokens of the prompt (automatic prefix caching)
fork         [b0 b1 b2 b3]         all prompt blocks of the parent, the first sequence of the same request
new                    [b7 b8]     for what is not shared
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.kv import BlockCopy, BlockTable, BlockTables, PrefixHit
from headrace.sched.capacity import BlockDemand, Capacity
from headrace.sched.forecast import Forecast
from headrace.sched.limits import SchedulerLimits
from headrace.sched.plan_builder import PlanBuilder
from headrace.sched.sequence import Sequence, State
from headrace.sched.slots import SlotTable
from headrace.types import TokenIds

# Share of the KV cache that may be overcommitted: recomputing so little after a preemption costs less than
# starting a few sequences later, which then decode in small batches.
OVERCOMMIT = 0.03


@dataclass(frozen=True, slots=True)
class Placed:
    """The blocks of a sequence that starts."""

    table: BlockTable
    num_cached: int  # leading tokens that need not be computed
    copy: BlockCopy | None  # copy on write of the last shared block, before the step
    num_loaded: int = 0  # of the cached tokens, those that come from the tiers
    is_arriving: bool = False  # its blocks are copied from the host tier beside this step


class Placement:
    """Owns the capacity policy and the forecast. Blocks themselves belong to `tables`."""

    def __init__(self, limits: SchedulerLimits, tables: BlockTables, slots: SlotTable) -> None:
        self.forecast = Forecast()
        self.capacity = Capacity(tables, limits.capacity_policy)
        self._limits = limits
        self._tables = tables
        self._slots = slots
        self._blocked: tuple[Sequence, int] | None = (
            None  # the sequence that did not fit, and the pool's `num_drops` then
        )

    def lacks_blocks(self, sequence: Sequence) -> bool:
        """Whether it did not fit when it was last placed, and no block was given back since."""
        return self._blocked == (sequence, self._tables.pool.num_drops)

    def place(self, sequence: Sequence, builder: PlanBuilder) -> Placed | None:
        """Take blocks for a waiting sequence, or none if there is no room for it."""
        if self.lacks_blocks(sequence):
            return None
        source = self._fork_source(sequence, builder)
        hit = self._hit_of_fork(sequence, source) if source else self._hit_of_prompt(sequence, builder)
        stored = [] if source else self._stored_after(sequence, hit)
        num_found = (hit.num_blocks + len(stored)) * self._limits.block_size
        num_cached = min(num_found, len(sequence.token_ids) - 1)
        if len(sequence.token_ids) - num_cached > builder.budget_of(sequence.request) and not self._may_chunk(builder):
            return None
        num_in_pool = min(hit.num_blocks * self._limits.block_size, num_cached)
        writes_shared = num_cached // self._limits.block_size < hit.num_blocks
        copies_block = writes_shared and self._tables.pool.count(hit.blocks[-1]) > 0
        demand = self.capacity.demand(sequence, hit, copies_block=copies_block)
        if not (
            self.capacity.admits(demand, is_first=self._slots.num_running == 0) and self._fits_later(sequence, demand)
        ):
            self._blocked = (sequence, self._tables.pool.num_drops)
            return None
        table = self._open(sequence, hit, source, stored)
        copy = self._tables.make_writable(table, num_cached) if writes_shared else None
        self.capacity.opened(sequence, table)
        builder.arriving.update(table.blocks[hit.num_blocks : hit.num_blocks + len(stored)])
        is_arriving = not builder.arriving.isdisjoint(table.blocks)
        return Placed(table, num_cached, copy, num_cached - num_in_pool, is_arriving)

    def _open(self, sequence: Sequence, hit: PrefixHit, source: BlockTable | None, stored: list[bytes]) -> BlockTable:
        if source is not None:
            return self._tables.fork(source, sequence.prompt_len)
        if stored:
            return self._tables.open_stored(hit, sequence.token_ids, stored)
        return self._tables.open(hit, len(sequence.token_ids))

    def _fits_later(self, sequence: Sequence, demand: BlockDemand) -> bool:
        """Whether the KV cache is expected to hold all running sequences to their ends, within `OVERCOMMIT`. Those that
        it cannot hold would be preempted and recomputed."""
        if self._slots.num_running == 0 or self.capacity.fits_to_the_end(demand):
            return True
        block_size, pool = self._limits.block_size, self._tables.pool
        num_held = (pool.num_held + demand.num_now) * block_size
        max_tokens = pool.num_blocks * block_size * (1.0 + OVERCOMMIT)
        return self.forecast.peak_tokens(self._slots, sequence, num_held=num_held) <= max_tokens

    def _may_chunk(self, builder: PlanBuilder) -> bool:
        """A prompt that exceeds the budget is chunked only if the step would otherwise be small: whole prompts are
        cheaper to compute."""
        num_tokens = self._limits.max_num_batched_tokens - builder.budget
        return self._limits.enable_chunked_prefill and num_tokens < self._limits.full_step_tokens

    def _fork_source(self, sequence: Sequence, builder: PlanBuilder) -> BlockTable | None:
        """The parent's blocks, if it still runs and neither of the two was preempted with an answer. Where slots have a
        recurrent state, a sibling computes the prompt itself."""
        parent = sequence.parent if not self._limits.has_recurrent_state else None
        if parent is None or parent.state is not State.RUNNING or sequence.has_answer or parent.has_answer:
            return None
        if self._slots.computed[parent.slot] < sequence.prompt_len:
            return None
        table = parent.table
        assert table is not None, f"slot {parent.slot} has no blocks"
        last_block = table.blocks[self._tables.num_blocks_for(sequence.prompt_len) - 1]
        return None if last_block in builder.written else table

    def _hit_of_fork(self, sequence: Sequence, source: BlockTable) -> PrefixHit:
        return PrefixHit(tuple(source.blocks[: self._tables.num_blocks_for(sequence.prompt_len)]), source.last_entry)

    def _hit_of_prompt(self, sequence: Sequence, builder: PlanBuilder) -> PrefixHit:
        token_ids, salt = self.reusable_tokens(sequence), sequence.salt
        if token_ids is None:
            return PrefixHit((), salt or "")
        hit = self._tables.find_prefix(token_ids, salt)
        is_full = hit.num_blocks * self._limits.block_size == len(sequence.token_ids)
        # Copies come before the step that writes it, and before the copies from the host tier have ended.
        if is_full and (hit.blocks[-1] in builder.written or hit.blocks[-1] in builder.arriving):
            return self._tables.find_prefix(token_ids[:-1], salt)
        return hit

    def reusable_tokens(self, sequence: Sequence) -> TokenIds | None:
        """The tokens whose blocks need not be computed if they are cached; None: all have to be computed."""
        # With prompt_logprobs every token of the prompt has to be computed.
        if sequence.needs_prompt_logprobs or not self._limits.shares_prefix(sequence.request):
            return None
        readout, token_ids = sequence.request.readout, sequence.token_ids
        return token_ids if readout is None else token_ids[: readout.first_position(len(token_ids))]

    def _stored_after(self, sequence: Sequence, hit: PrefixHit) -> list[bytes]:
        """The blocks of its prompt after the hit that are in the host tier."""
        token_ids = None if self._tables.tiers is None else self.reusable_tokens(sequence)
        return [] if token_ids is None else self._tables.stored_after(hit, token_ids)
