"""Plans each step: which sequences compute how many tokens, which ones start, which ones are preempted.

There is no prefill phase and no decode phase: a sequence has tokens, and some of them are computed. A step first takes
all decoding sequences, whose only uncomputed token is the last sampled one, then those that prefill (also again after
a preemption), then starts waiting ones, within one token budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from time import monotonic

import numpy as np

from headrace.errors import RequestError
from headrace.kv import BlockStore, BlockTables, Chain, Tiers
from headrace.sched.background import BackgroundLimit, BackgroundPace
from headrace.sched.counters import Counters
from headrace.sched.drafting import Drafting
from headrace.sched.events import EventWriter, why_broken
from headrace.sched.fetching import LOOK_AHEAD, Fetching
from headrace.sched.growth import Growth
from headrace.sched.intake import Intake
from headrace.sched.limits import SchedulerLimits
from headrace.sched.microbatches import Microbatches
from headrace.sched.placement import Placed, Placement
from headrace.sched.plan_builder import PlanBuilder
from headrace.sched.readout_chunks import readout_chunk
from headrace.sched.sequence import Sequence, State, sequences_of
from headrace.sched.slots import SlotTable
from headrace.sched.stats import SchedulerStats
from headrace.sched.token_gaps import TokenGaps
from headrace.sched.urgency import Urgency, is_paused
from headrace.sched.waiting import Waiting
from headrace.steps import (
    BROKEN,
    FULL,
    STOPPED,
    Drafts,
    IntArray,
    LoadedAdapter,
    ReadoutResult,
    StepPlan,
    StepResult,
)
from headrace.types import FinishReason, Request, SequenceEvent

MAX_CLEAN_SHARE = 0.25  # of the blocks: those that are kept free, or copied to the host tier before they are evicted


class Scheduler:
    """Owns sequences, slots and blocks. Only `plan`, `apply`, `add` and `abort` change them."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        clock: Callable[[], float] = monotonic,
        chain: Chain | None = None,
        store: BlockStore | None = None,
    ) -> None:
        """`chain` and `store`: names of blocks, and the disk, of the tiers that `limits` asks for."""
        self.limits = limits
        self.tables = BlockTables(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            enable_prefix_caching=True,  # for the requests that use it: `SchedulerLimits.shares_prefix`
            tiers=Tiers(limits.num_host_blocks, chain or Chain(), store) if limits.num_host_blocks else None,
            num_clean=min(2 * limits.max_blocks_per_step, int(limits.num_blocks * MAX_CLEAN_SHARE)),
        )
        self.slots = SlotTable(limits.max_num_seqs, limits.max_model_len)
        self.max_running = limits.max_num_seqs  # may be lowered for a while
        self._placement = Placement(limits, self.tables, self.slots)
        self._growth = Growth(self.tables, self.slots, self._placement.capacity)
        self._microbatches = Microbatches(limits.num_stages, self.slots)
        self._waiting = Waiting(by_priority=limits.queue_policy == "priority")
        self._queue = self._waiting.queue
        self._fetching = (
            None
            if store is None
            else Fetching(self.tables, self._placement, clock, max_step_tokens=limits.max_num_batched_tokens)
        )
        self._prefilling: list[Sequence] = []  # running, but not decoding yet
        self._requests: dict[str, list[Sequence]] = {}  # the unfinished sequences of each request
        self._token_gaps = TokenGaps(limits.max_num_seqs)
        self._pace = BackgroundPace(limits.max_num_batched_tokens)
        self._urgency = Urgency(self._queue, self.slots, self._pace, clock)
        self.drafting = (
            None if limits.speculation is None else Drafting(limits.speculation, self.slots, limits.max_num_seqs)
        )
        self._counters = Counters(limits, self.tables, self.slots)
        self._stats = self._counters.stats
        self._events = EventWriter(self.slots)
        self._intake = Intake(self.slots, self._events, self.drafting, self._stats)
        self._clock = clock
        self._num_arrived = 0
        self._next_step = 0
        self._last_plan: StepPlan | None = None

    # ---- requests

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def is_unfinished(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def stats(self) -> SchedulerStats:
        return self._counters.snapshot(self._token_gaps, num_waiting=self._waiting.num_sequences)

    @property
    def waiting_adapters(self) -> Counter[int]:
        """Waiting sequences of each adapter, by index."""
        return self._waiting.adapters

    def add(
        self,
        request: Request,
        *,
        seeds: tuple[int, ...],
        stop_token_ids: tuple[int, ...],
        adapter: LoadedAdapter | None = None,
    ) -> None:
        """Queue a request, or refuse it if it could never run. `seeds` has one seed for each of its sequences."""
        self.limits.check(request)  # again, as a request past these bounds would corrupt the block tables
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is already running", param="request_id")
        sequences = sequences_of(
            request,
            seeds,
            stop_token_ids=stop_token_ids,
            end_len=self.limits.end_len(request),
            first_arrival=self._num_arrived + 1,
            adapter=adapter,
        )
        self._num_arrived += len(sequences)
        self._requests[request.request_id] = list(sequences)
        self._pace.added(len(sequences), prompt_len=len(request.prompt_token_ids), is_background=request.is_background)
        self._waiting.add(sequences)

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceEvent]:
        """End a request, or one of its sequences, at once. Unknown and finished ones are ignored."""
        chosen = [s for s in self._requests.get(request_id, ()) if index is None or s.index == index]
        events = []
        for sequence in chosen:
            self._stats.num_aborted += 1
            events.append(self._finish(sequence, "abort"))
        return events

    # ---- plan

    def plan(self) -> StepPlan | None:
        """Plan the next step; None if there is nothing to compute, or if steps in flight have to end first."""
        if self._microbatches.is_full or self._waits_for_drafts():
            return None
        max_seqs = self._microbatches.max_seqs(self.slots.num_running + self._num_next(), self._next_step)
        builder = PlanBuilder(self._next_step, self.limits.max_num_batched_tokens, max_seqs)
        if self._fetching is not None:
            self._look_ahead(self._fetching)
        self._waiting.begin_step()
        is_urgent = self._make_room_for_urgent()
        priority = self._urgency.priority_of_prompts(self._prefilling, is_urgent=is_urgent)
        background = self._urgency.limit_background(priority)
        if background.must_wait:
            return None
        if self.limits.enable_chunked_prefill:
            if background.max_tokens is not None:
                builder.background_budget = background.max_tokens
            self._compute_decoding(builder, background, priority=priority)
            less_urgent = self._compute_prefilling(builder, priority)
            self._start_waiting(builder, priority, at_once=is_urgent)
            if builder.is_empty:  # there is no step beside which blocks could arrive
                self._compute_rest([s for s in self._prefilling if s.slot in builder.arriving_slots], builder)
            if builder.is_empty:  # what is less urgent goes on where nothing urgent could start
                self._compute_decoding(builder, background)
                self._compute_rest(less_urgent, builder)
        else:  # whole prompts in steps of their own, before the next decode step
            self._start_waiting(builder, priority, at_once=is_urgent)
            if builder.is_empty:
                self._compute_decoding(builder, background)
        if builder.is_empty:
            return None
        plan = builder.finish(self._last_plan, self.tables.take_transfers(self._next_step))
        self._last_plan = plan
        self._next_step += 1
        self._microbatches.num_in_flight += 1
        self._counters.planned(plan, builder.num_prompts_completed)
        if self._fetching is not None:
            self._fetching.compute_rate.planned(plan, self._clock())
        if self._queue.by_priority:
            self._pace.planned(plan, self._clock(), background, num_background=builder.num_background)
        return plan

    def plan_saving(self) -> StepPlan | None:
        """A step that computes nothing and copies idle blocks to the host tier, from where they go to the disk; None if
        there are none left. For the end: called until then, with nothing in flight."""
        transfers = self.tables.take_saving_transfers(self._next_step)
        if transfers is None:
            return None
        builder = PlanBuilder(self._next_step, 0)
        self._next_step += 1
        return builder.finish(None, transfers)

    def _look_ahead(self, fetching: Fetching) -> None:
        slots = [sequence.slot for sequence in self._prefilling]
        num_tokens = int((self.slots.total[slots] - self.slots.computed[slots]).sum())
        fetching.look_ahead(self._queue.near_head(LOOK_AHEAD), num_tokens_before=num_tokens)

    def _waits_for_drafts(self) -> bool:
        """Whether steps in flight have to end first: one with drafts, whose accepted tokens only the device knows, or
        those before the next one with drafts, which continue known tokens."""
        if self.drafting is None or not self._microbatches.num_in_flight:
            return False
        assert self._last_plan is not None
        return self._last_plan.drafts is not None or self._may_speculate()

    def _may_speculate(self) -> bool:
        """Whether drafts are due and the next step only decodes."""
        if self.drafting is None or self._prefilling or self._num_next():
            return False
        return self.drafting.is_due(self.slots.decoding())

    def _compute_decoding(
        self, builder: PlanBuilder, background: BackgroundLimit, *, priority: int | None = None
    ) -> None:
        """With `priority`, of the sequences with this number or a lower one only."""
        slots = self._decoding_with_blocks(builder, priority, background.max_tokens)
        if len(slots):
            is_limited = background.max_tokens is not None
            num_background = int(self.slots.is_background[slots].sum()) if is_limited else 0
            next_tokens = self._microbatches.planned(slots, builder.step)
            drafts = None if is_limited or priority is not None else self._drafts_of(slots, builder)
            builder.compute_decoding(slots, next_tokens, drafts=drafts, num_background=num_background)
            self.slots.advance_decoding(slots)

    def _drafts_of(self, slots: IntArray, builder: PlanBuilder) -> Drafts | None:
        """Drafts for a step that decodes these slots, with blocks for them; None if there are none, or no blocks."""
        if self.drafting is None:
            return None
        if self._microbatches.num_in_flight or not self._may_speculate():
            self.drafting.pass_step(slots)
            return None
        drafts = self.drafting.propose(slots)
        if drafts is None or not self._growth.make_room(slots, self.slots.total[slots] + drafts.lens, builder):
            return None
        self.drafting.planned(slots, drafts)
        return drafts

    def _decoding_with_blocks(self, builder: PlanBuilder, priority: int | None, max_background: int | None) -> IntArray:
        """The decoding slots, each with a block for its next token. Preempts the youngest sequences if none is left."""
        slots, growing = self._decoding_and_growing(builder, priority, max_background)
        while len(growing) > self.tables.pool.num_available:
            self._preempt(self._urgency.least_urgent())
            builder.has_preempted = True
            slots, growing = self._decoding_and_growing(builder, priority, max_background)
        if len(growing):
            self._growth.append_block(growing, builder)
        return slots

    def _decoding_and_growing(
        self, builder: PlanBuilder, priority: int | None, max_background: int | None
    ) -> tuple[IntArray, IntArray]:
        slots = self.slots.decoding_within(priority=priority, max_background=max_background)
        slots = self._microbatches.share_of(slots, builder.max_seqs)
        return slots, slots[self.slots.total[slots] > self.slots.capacity[slots]]

    def _compute_prefilling(self, builder: PlanBuilder, priority: int | None) -> list[Sequence]:
        """Prefill continuations. Returns those that are left for later, since a more urgent sequence waits to start or
        is computed."""
        if not self._prefilling:
            return []
        later = [s for s in self._prefilling if self._gives_way(s) or is_paused(s, priority)]
        now = [s for s in self._prefilling if s not in later] if later else self._prefilling
        self._prefilling = [*later, *(s for s in now if not self._compute_chunk(s, builder))]
        return later

    def _compute_rest(self, sequences: list[Sequence], builder: PlanBuilder) -> None:
        for sequence in sequences:
            if self._compute_chunk(sequence, builder):
                self._prefilling.remove(sequence)

    def _compute_chunk(self, sequence: Sequence, builder: PlanBuilder) -> bool:
        """Compute as many of a sequence's tokens as the budget allows; returns whether all of them are computed."""
        slot, slots = sequence.slot, self.slots
        budget = builder.budget_of(sequence.request) if sequence.parent is None else builder.budget
        num_tokens = min(int(slots.total[slot] - slots.computed[slot]), budget)
        if num_tokens == 0:
            return False
        assert sequence.table is not None
        if slot in builder.arriving_slots and self.tables.tiers is not None:
            self.tables.tiers.needs_now()
        start = int(slots.computed[slot])
        builder.written.update(sequence.table.blocks[start // self.limits.block_size :])
        is_complete = slots.advance(slot, num_tokens)
        builder.compute(
            slot,
            num_tokens,
            samples=is_complete and sequence.request.readout is None,
            is_background=sequence.request.is_background,
        )
        if (chunk := readout_chunk(sequence, start, num_tokens)) is not None:
            builder.read_out(chunk)
        if self.limits.shares_prefix(sequence.request):
            self.tables.publish(sequence.table, sequence.token_ids, int(slots.computed[slot]))
        if is_complete and sequence.siblings:
            self._waiting.fork_next(sequence.siblings)
            sequence.siblings = []
        return is_complete

    # ---- starting

    def _make_room_for_urgent(self) -> bool:
        """Whether a running sequence is less urgent than the first of the queue (never under `fcfs`). It is preempted
        if the other one lacks a slot or blocks: one a step, as others may end meanwhile."""
        may_preempt = self._queue.by_priority and self.limits.capacity_policy == "max_utilization"
        head = self._queue.head() if may_preempt else None
        if head is None or self._waiting.has_forks or not self.slots.num_running:
            return False
        least_urgent = self._urgency.less_urgent_than(head)
        if least_urgent is None:
            return False
        has_room = self._num_startable() > 0 and not self._placement.lacks_blocks(head)
        if not has_room:
            if self.slots.num_running > self.max_running:
                return False  # the limit was lowered: one sequence less would not help
            self._preempt(least_urgent)
        return True

    def _gives_way(self, sequence: Sequence) -> bool:
        """Whether a more urgent sequence could start now."""
        return self._num_startable() > 0 and self._urgency.is_less_urgent_than_queue(sequence)

    def _start_waiting(self, builder: PlanBuilder, priority: int | None, *, at_once: bool = False) -> None:
        """`at_once`: the first of the queue is urgent and does not wait for more free slots."""
        min_free = min(self.limits.min_free_slots_to_start, self._waiting.num_sequences)
        if not at_once and self._num_startable() < min_free:
            return
        first: Sequence | None = None
        waits_for_batch = self.limits.capacity_policy == "static_batch" and self.slots.num_running > 0
        while builder.budget and self._num_startable() > 0 and not builder.has_preempted:
            sequence = self._waiting.first()
            is_fork = self._waiting.has_forks
            if waits_for_batch and not is_fork:  # siblings belong to the batch of their parent
                return
            if sequence is None or (at_once and first is not None and self._queue.is_less_urgent(sequence, first)):
                return
            if not is_fork and (is_paused(sequence, priority) or not builder.budget_of(sequence.request)):
                return
            if not self._start(sequence, builder):
                return
            first = first or sequence
            self._waiting.take(sequence)
            sequence.state = State.RUNNING
            if self._comes_later(sequence, builder) or not self._compute_chunk(sequence, builder):
                self._prefilling.append(sequence)

    def _comes_later(self, sequence: Sequence, builder: PlanBuilder) -> bool:
        """Whether its blocks are copied from the host tier beside this step, and it is computed in the next one."""
        return sequence.slot in builder.arriving_slots and self.limits.enable_chunked_prefill

    def _num_startable(self) -> int:
        return min(self.slots.num_free, self.max_running - self.slots.num_running)

    def _num_next(self) -> int:
        """Sequences that could start now."""
        return max(0, min(self._waiting.num_sequences, self._num_startable()))

    def _start(self, sequence: Sequence, builder: PlanBuilder) -> bool:
        """Give a waiting sequence blocks and a slot, if there is room for it."""
        num_tokens = self.limits.max_num_batched_tokens - builder.budget
        if self._fetching is not None and self._fetching.is_waiting(sequence, num_tokens_before=num_tokens):
            return False
        placed = self._placement.place(sequence, builder)
        if placed is None:
            return False
        sequence.table = placed.table
        if sequence.needs_prompt_logprobs:
            sequence.prompt_logprobs = [None]  # from the first token, also after a preemption
        self._note_start(sequence, placed)
        slot = self.slots.occupy(
            sequence,
            step=builder.step,
            num_computed=placed.num_cached,
            capacity=len(placed.table.blocks) * self.limits.block_size,
        )
        sequence.slot = slot
        if placed.is_arriving:
            builder.arriving_slots.add(slot)
        self._token_gaps.enter(slot, sequence.last_token_at)
        if self.drafting is not None:
            self.drafting.enter(slot)
        builder.enter(sequence.slot_entry(placed.num_cached), placed.table.blocks, placed.copy)
        return True

    def _note_start(self, sequence: Sequence, placed: Placed) -> None:
        is_first = sequence.started_at is None
        self._counters.started(sequence, placed, is_first=is_first)
        if is_first:
            sequence.started_at = self._clock()
            sequence.num_cached_tokens = placed.num_cached

    # ---- leaving

    def _preempt(self, sequence: Sequence) -> None:
        """Put a sequence back into the queue with all tokens known so far. Tokens in flight are sampled again, with the
        same result: sampling depends only on seed and position."""
        self._stats.num_preemptions += 1
        sequence.num_preemptions += 1
        sequence.last_token_at = self._token_gaps.last_at(sequence.slot)
        sequence.token_ids = self.slots.known_tokens(sequence.slot).copy()
        self._leave_slot(sequence)
        sequence.readout_results = []
        sequence.state = State.WAITING
        self._waiting.put_back(sequence)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> SequenceEvent:
        if sequence.state is State.RUNNING:
            sequence.last_token_at = self._token_gaps.last_at(sequence.slot)
        event = self._events.last(sequence, reason, error)
        if sequence.state is State.RUNNING:
            self._leave_slot(sequence)
        else:
            self._waiting.drop(sequence)
        self._waiting.fork(sequence.siblings)  # of a parent that ends before its prompt is computed
        sequence.siblings = []
        sequence.state = State.FINISHED
        self._pace.ended(self._clock(), is_background=sequence.request.is_background)
        remaining = self._requests[sequence.request.request_id]
        remaining.remove(sequence)
        if not remaining:
            del self._requests[sequence.request.request_id]
        return event

    def _leave_slot(self, sequence: Sequence) -> None:
        """Give back slot and blocks. Steps in flight may still write there; the next owner's steps come after them."""
        slot, slots, table = sequence.slot, self.slots, sequence.table
        assert table is not None
        num_computed = min(int(slots.computed[slot]), int(slots.known[slot]) - 1)
        if self.limits.shares_prefix(sequence.request):
            self.tables.publish(table, slots.known_tokens(slot), num_computed)
        self._placement.capacity.closing(sequence, table)
        self.tables.close(table)
        sequence.table = None
        slots.vacate(slot)
        sequence.slot = -1
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)

    # ---- apply

    def apply(self, result: StepResult) -> list[SequenceEvent]:
        """Take in the result of a step; returns events for watched sequences and for those that ended."""
        self._microbatches.num_in_flight -= 1
        now = self._clock()
        self._pace.applied(result.step, now)
        if self._fetching is not None:
            self._fetching.compute_rate.applied(result.step, now)
        slots, finished, is_over = self._intake.take(result)
        self._note_times(slots, now)
        events = []
        for position in np.flatnonzero(is_over | self.slots.is_watched[slots]).tolist():
            sequence = self.slots.sequences[slots[position]]
            assert sequence is not None
            if is_over[position]:
                events.append(self._end(sequence, int(finished[position])))
            else:
                events.append(self._events.events(sequence))
                if not sequence.request.watched:  # only its first token was announced
                    self.slots.is_watched[sequence.slot] = False
        for readout_result in result.readout_results:
            if self.slots.since[readout_result.slot] <= result.step:
                events += self._take_readout(readout_result)
        return events

    def _note_times(self, slots: IntArray, now: float) -> None:
        for slot in self._token_gaps.take(slots, now).tolist():
            sequence = self.slots.sequences[slot]
            assert sequence is not None
            sequence.first_token_at = now
            self._note_prompt(sequence, now)

    def _note_prompt(self, sequence: Sequence, now: float) -> None:
        """A prompt is computed. Siblings share that of their parent."""
        if self._queue.by_priority and sequence.parent is None and not sequence.request.is_background:
            self._pace.computed_prompt(int(self.slots.since[sequence.slot]), now)

    def _take_readout(self, readout_result: ReadoutResult) -> list[SequenceEvent]:
        sequence = self.slots.sequences[readout_result.slot]
        assert sequence is not None
        if not np.isfinite(readout_result.values).all():
            self._stats.num_finished += 1
            return [self._finish(sequence, "abort", "the model gave no valid numbers (NaN) for the prompt")]
        sequence.readout_results.append(readout_result)
        if not readout_result.is_last:
            return []
        self._note_prompt(sequence, self._clock())
        return [self._end(sequence, FULL)]

    def _end(self, sequence: Sequence, finished: int) -> SequenceEvent:
        self._stats.num_finished += 1
        if not sequence.has_exact_length:
            self._placement.forecast.learn(
                int(self.slots.known[sequence.slot]) - sequence.prompt_len, sequence.end_len - sequence.prompt_len
            )
        if finished == BROKEN:
            self._events.take_back_last(sequence)
            return self._finish(sequence, "abort", why_broken(sequence))
        return self._finish(sequence, "stop" if finished == STOPPED else "length")
