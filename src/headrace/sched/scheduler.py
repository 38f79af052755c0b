"""Decides each step: who computes how many tokens, who starts, who gives way.

There is no prefill and no decode phase: a sequence has tokens and some of them are computed. A step first moves on
all that are one behind (steady), then those further behind, then starts waiting ones, within one budget of tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

import numpy as np

from headrace.errors import RequestError
from headrace.histogram import Histogram
from headrace.kv import BlockTable, BlockTables, PrefixHit
from headrace.sched.capacity import BlockDemand, Capacity
from headrace.sched.draft import PlanDraft
from headrace.sched.events import EventWriter
from headrace.sched.forecast import Forecast
from headrace.sched.limits import SchedulerLimits
from headrace.sched.queue import WaitingQueue
from headrace.sched.sequence import Sequence, State
from headrace.sched.slots import SlotTable
from headrace.sched.stats import BATCH_TOKENS_BOUNDS, SchedulerStats
from headrace.sched.token_gaps import TokenGaps
from headrace.steps import BROKEN, FULL, GOES_ON, STOPPED, IntArray, Read, Reading, SlotEntry, StepPlan, StepResult
from headrace.types import FinishReason, Request, SequenceEvent

# Of the cache, that may be promised beyond it: to compute so little again costs less than a few rows alone, later.
OVERCOMMIT = 0.03

_NOTHING_TO_DRAW = (
    "no token could be drawn: the model gave no valid probabilities (NaN), or allowed_token_ids, bad_words, "
    "min_tokens and structured_outputs together forbid every token"
)


class Scheduler:
    """Owns sequences, rows and blocks. `plan` and `apply` are the only ways in which they change, but for `add` and
    `abort`."""

    def __init__(self, limits: SchedulerLimits, *, clock: Callable[[], float] = monotonic) -> None:
        self.limits = limits
        self.tables = BlockTables(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            enable_prefix_caching=limits.enable_prefix_caching,
        )
        self.slots = SlotTable(limits.max_num_seqs, limits.max_model_len)
        self.max_running = limits.max_num_seqs  # may be set lower, for a while
        self._capacity = Capacity(self.tables, limits.capacity_policy)
        self._forecast = Forecast()
        self._queue = WaitingQueue(by_priority=limits.queue_policy == "priority")
        self._forks: deque[Sequence] = deque()  # siblings whose prompt is computed; they go before the queue
        self._next_forks: list[Sequence] = []  # siblings whose prompt is computed in the last planned step
        self._lagging: list[Sequence] = []  # running, with prompt tokens left to compute
        self._requests: dict[str, list[Sequence]] = {}  # the unfinished sequences of each request
        self._events = EventWriter(self.slots)
        self._stats = SchedulerStats(num_blocks=limits.num_blocks, block_size=limits.block_size)
        self._batch_tokens = Histogram(BATCH_TOKENS_BOUNDS)
        self._token_gaps = TokenGaps(limits.max_num_seqs)
        self._clock = clock
        self._num_arrived = 0
        self._num_waiting = 0
        self._next_step = 0
        self._last_plan: StepPlan | None = None
        self._blocked: tuple[Sequence, int] | None = None  # who did not fit, and the pool's drops at that time

    # ---- requests

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def is_unfinished(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def stats(self) -> SchedulerStats:
        pool = self.tables.pool
        return replace(
            self._stats,
            num_running=self.slots.num_running,
            num_waiting=self._num_waiting,
            num_blocks_held=pool.num_held,
            num_blocks_idle=pool.num_idle,
            batch_tokens=self._batch_tokens.snapshot(),
            token_gaps=self._token_gaps.histogram.snapshot(),
        )

    def add(self, request: Request, *, seeds: tuple[int, ...], stop_token_ids: tuple[int, ...]) -> None:
        """Queue a request; `seeds` has one for each of its sequences. Refused if it could never run."""
        self.limits.check(request)
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is already running", param="request_id")
        sequences: list[Sequence] = []
        for index, seed in enumerate(seeds):
            parent = sequences[0] if sequences else None
            sequences.append(self._new_sequence(request, index, seed, stop_token_ids, parent))
        parent = sequences[0]
        parent.siblings = sequences[1:]
        self._requests[request.request_id] = list(sequences)
        self._num_waiting += len(sequences)
        self._queue.push(parent)

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceEvent]:
        """End a request, or one of its sequences, at once. Unknown or finished ones are left in peace."""
        chosen = [s for s in self._requests.get(request_id, ()) if index is None or s.index == index]
        events = []
        for sequence in chosen:
            self._stats.num_aborted += 1
            events.append(self._finish(sequence, "abort"))
        return events

    def _new_sequence(
        self, request: Request, index: int, seed: int, stop_token_ids: tuple[int, ...], parent: Sequence | None
    ) -> Sequence:
        self._num_arrived += 1
        return Sequence(
            request=request,
            index=index,
            seed=seed,
            arrival=self._num_arrived,
            end_len=self.limits.end_len(request),
            stop_token_ids=stop_token_ids,
            token_ids=request.prompt_token_ids,
            parent=parent,
            logprobs=[] if request.params.uses_logprobs else None,
            prompt_logprobs=None if request.params.prompt_logprobs is None or parent is not None else [None],
        )

    # ---- plan

    def plan(self) -> StepPlan | None:
        """The next step, or nothing if there is nothing to compute."""
        draft = PlanDraft(self._next_step, self.limits.max_num_batched_tokens)
        self._forks.extend(self._next_forks)
        self._next_forks.clear()
        if self.limits.enable_chunked_prefill:
            self._compute_steady(draft)
            self._compute_lagging(draft)
            self._admit(draft)
        else:  # whole prompts in steps of their own, before decoding goes on
            self._admit(draft)
            if draft.is_empty:
                self._compute_steady(draft)
        if draft.is_empty:
            return None
        plan = draft.finish(self._last_plan)
        self._last_plan = plan
        self._next_step += 1
        self._count(plan)
        return plan

    def _compute_steady(self, draft: PlanDraft) -> None:
        slots = self._with_room(draft)
        if len(slots):
            draft.compute_steady(slots)
            self.slots.advance_steady(slots)

    def _with_room(self, draft: PlanDraft) -> IntArray:
        """The steady rows, each with a block for its next token; the youngest sequences give way if need be."""
        slots, needy = self._steady_and_needy()
        while len(needy) > self.tables.pool.num_available:
            self._preempt(max(self.slots.running(), key=self._queue.order))
            draft.has_preempted = True
            slots, needy = self._steady_and_needy()
        if len(needy):
            blocks = self.tables.pool.take(len(needy))
            for slot, block in zip(needy.tolist(), blocks, strict=True):
                self._table_of(slot).blocks.append(block)
            indexes = self.slots.capacity[needy] // self.limits.block_size
            draft.write_tables(needy, indexes, np.array(blocks, np.int64))
            self.slots.capacity[needy] += self.limits.block_size
            self._capacity.grew(len(needy))
        return slots

    def _steady_and_needy(self) -> tuple[IntArray, IntArray]:
        slots = self.slots.steady()
        return slots, slots[self.slots.total[slots] > self.slots.capacity[slots]]

    def _table_of(self, slot: int) -> BlockTable:
        sequence = self.slots.sequences[slot]
        assert sequence is not None and sequence.table is not None, f"row {slot} has no owner"
        return sequence.table

    def _compute_lagging(self, draft: PlanDraft) -> None:
        if self._lagging:
            self._lagging = [s for s in self._lagging if not self._compute_part(s, draft)]

    def _compute_part(self, sequence: Sequence, draft: PlanDraft) -> bool:
        """As much of a sequence's uncomputed tokens as the budget allows; whether that was all of them."""
        slot, slots = sequence.slot, self.slots
        num_tokens = min(int(slots.total[slot] - slots.computed[slot]), draft.budget)
        if num_tokens == 0:
            return False
        assert sequence.table is not None
        start = int(slots.computed[slot])
        draft.written.update(sequence.table.blocks[start // self.limits.block_size :])
        is_complete = slots.advance(slot, num_tokens)
        draft.compute(slot, num_tokens, samples=is_complete and sequence.request.readout is None)
        self._read_part(sequence, start, num_tokens, draft)
        self.tables.publish(sequence.table, sequence.token_ids, int(slots.computed[slot]))
        if is_complete and sequence.siblings:
            self._next_forks.extend(sequence.siblings)
            sequence.siblings = []
        return is_complete

    def _read_part(self, sequence: Sequence, start: int, num_tokens: int, draft: PlanDraft) -> None:
        """Ask for what a readout needs of the prompt tokens that this step computes."""
        readout, prompt_len = sequence.request.readout, sequence.prompt_len
        if readout is None:
            return
        first_read, end = readout.first_read(prompt_len), start + num_tokens
        first = max(start, first_read)
        if first < end:
            targets = None if readout.targets is None else readout.targets[first - first_read : end - first_read]
            draft.read(Read(sequence.slot, first - start, end - first, targets, is_last=end == prompt_len))

    # ---- admission

    def _admit(self, draft: PlanDraft) -> None:
        if self._num_startable() < min(self.limits.admit_at_once, self._num_waiting):
            return
        is_closed = self.limits.capacity_policy == "static_batch" and self.slots.num_running > 0
        while draft.budget and self._num_startable() > 0 and not draft.has_preempted:
            sequence = self._next_waiting()
            if is_closed and not self._forks:  # siblings belong to the batch of their leader
                return
            if sequence is None or not self._start(sequence, draft):
                return
            if self._forks and self._forks[0] is sequence:
                self._forks.popleft()
            else:
                self._queue.pop()
            sequence.state = State.RUNNING
            self._num_waiting -= 1
            if not self._compute_part(sequence, draft):
                self._lagging.append(sequence)

    def _num_startable(self) -> int:
        return min(self.slots.num_free, self.max_running - self.slots.num_running)

    def _next_waiting(self) -> Sequence | None:
        while self._forks and self._forks[0].state is not State.WAITING:
            self._forks.popleft()
        return self._forks[0] if self._forks else self._queue.head()

    def _start(self, sequence: Sequence, draft: PlanDraft) -> bool:
        """Give a waiting sequence blocks and a row, if there is room for it."""
        if self._blocked == (sequence, self.tables.pool.num_drops):
            return False  # nothing was given back since it last did not fit
        source = self._fork_source(sequence, draft)
        hit = self._hit_of_fork(sequence, source) if source else self._hit_of_prompt(sequence, draft)
        num_cached = min(hit.num_blocks * self.limits.block_size, len(sequence.token_ids) - 1)
        if len(sequence.token_ids) - num_cached > draft.budget and not self._may_cut(draft):
            return False
        writes_shared = num_cached // self.limits.block_size < hit.num_blocks
        copies_block = writes_shared and self.tables.pool.count(hit.blocks[-1]) > 0
        demand = self._capacity.demand(sequence, hit, copies_block=copies_block)
        if not (
            self._capacity.admits(demand, is_first=self.slots.num_running == 0) and self._fits_later(sequence, demand)
        ):
            self._blocked = (sequence, self.tables.pool.num_drops)
            return False
        table = (
            self.tables.fork(source, sequence.prompt_len) if source else self.tables.open(hit, len(sequence.token_ids))
        )
        copy = self.tables.make_writable(table, num_cached) if writes_shared else None
        sequence.table = table
        if sequence.owes_prompt_logprobs:
            sequence.prompt_logprobs = [None]  # from the beginning, also after a preemption
        self._capacity.opened(sequence, table)
        self._count_start(sequence, num_cached)
        slot = self.slots.occupy(
            sequence,
            step=draft.step,
            num_computed=num_cached,
            capacity=len(table.blocks) * self.limits.block_size,
        )
        sequence.slot = slot
        self._token_gaps.enter(slot, sequence.last_token_at)
        draft.admit(self._slot_entry(sequence, num_cached), table.blocks, copy)
        return True

    def _fits_later(self, sequence: Sequence, demand: BlockDemand) -> bool:
        """Whether the cache will hold all that runs to its end, or nearly, as far as that is known; what it will not
        hold would be preempted and computed again."""
        if self.slots.num_running == 0 or self._capacity.fits_to_the_end(demand):
            return True
        block_size, pool = self.limits.block_size, self.tables.pool
        num_held = (pool.num_held + demand.num_now) * block_size
        most = pool.num_blocks * block_size * (1.0 + OVERCOMMIT)
        return self._forecast.peak_tokens(self.slots, sequence, num_held=num_held) <= most

    def _may_cut(self, draft: PlanDraft) -> bool:
        """A prompt that does not fit is cut only if the step would otherwise be small: whole ones are cheaper."""
        num_tokens = self.limits.max_num_batched_tokens - draft.budget
        return self.limits.enable_chunked_prefill and num_tokens < self.limits.full_step_tokens

    def _fork_source(self, sequence: Sequence, draft: PlanDraft) -> BlockTable | None:
        """The leader's blocks, if it still runs and neither has come back from a preemption with an answer."""
        parent = sequence.parent
        if parent is None or parent.state is not State.RUNNING or sequence.has_answer or parent.has_answer:
            return None
        if self.slots.computed[parent.slot] < sequence.prompt_len:
            return None
        table = self._table_of(parent.slot)
        last_block = table.blocks[self.tables.num_blocks_for(sequence.prompt_len) - 1]
        return None if last_block in draft.written else table

    def _hit_of_fork(self, sequence: Sequence, source: BlockTable) -> PrefixHit:
        return PrefixHit(tuple(source.blocks[: self.tables.num_blocks_for(sequence.prompt_len)]), source.last_entry)

    def _hit_of_prompt(self, sequence: Sequence, draft: PlanDraft) -> PrefixHit:
        token_ids, salt = sequence.token_ids, sequence.request.cache_salt
        if sequence.owes_prompt_logprobs:  # every token of the prompt has to be computed
            return PrefixHit((), salt or "")
        if sequence.request.readout is not None:
            return self.tables.find_prefix(token_ids[: sequence.request.readout.first_read(len(token_ids))], salt)
        hit = self.tables.find_prefix(token_ids, salt)
        is_full = hit.num_blocks * self.limits.block_size == len(token_ids)
        if is_full and hit.blocks[-1] in draft.written:  # too early to copy it
            return self.tables.find_prefix(token_ids[:-1], salt)
        return hit

    def _slot_entry(self, sequence: Sequence, num_computed: int) -> SlotEntry:
        return SlotEntry(
            slot=sequence.slot,
            token_ids=sequence.token_ids,
            num_computed=num_computed,
            prompt_len=sequence.prompt_len,
            end_len=sequence.end_len,
            seed=sequence.seed,
            params=sequence.request.params,
            stop_token_ids=sequence.stop_token_ids,
            num_prompt_logprobs=sequence.request.params.prompt_logprobs if sequence.owes_prompt_logprobs else None,
        )

    # ---- leaving

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue with all tokens known so far; what was in flight is drawn again, the same."""
        self._stats.num_preemptions += 1
        sequence.num_preemptions += 1
        sequence.last_token_at = self._token_gaps.last_at(sequence.slot)
        sequence.token_ids = self.slots.known_tokens(sequence.slot).copy()
        self._leave_slot(sequence)
        sequence.readings = []
        sequence.state = State.WAITING
        self._num_waiting += 1
        self._queue.push(sequence)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> SequenceEvent:
        if sequence.state is State.RUNNING:
            sequence.last_token_at = self._token_gaps.last_at(sequence.slot)
        event = self._events.last(sequence, reason, error)
        if sequence.state is State.RUNNING:
            self._leave_slot(sequence)
        else:
            self._num_waiting -= 1
        self._release_siblings(sequence)
        sequence.state = State.FINISHED
        remaining = self._requests[sequence.request.request_id]
        remaining.remove(sequence)
        if not remaining:
            del self._requests[sequence.request.request_id]
        return event

    def _release_siblings(self, sequence: Sequence) -> None:
        """A leader that ends before its prompt is computed leaves its siblings to start on their own."""
        self._forks.extend(s for s in sequence.siblings if s.state is State.WAITING)
        sequence.siblings = []

    def _leave_slot(self, sequence: Sequence) -> None:
        """Give back row and blocks. Steps in flight may still write there; whoever comes next computes later."""
        slot, slots, table = sequence.slot, self.slots, sequence.table
        assert table is not None
        num_computed = min(int(slots.computed[slot]), int(slots.known[slot]) - 1)
        self.tables.publish(table, slots.known_tokens(slot), num_computed)
        self._capacity.closing(sequence, table)
        self.tables.close(table)
        sequence.table = None
        slots.vacate(slot)
        sequence.slot = -1
        if sequence in self._lagging:
            self._lagging.remove(sequence)

    # ---- apply

    def apply(self, result: StepResult) -> list[SequenceEvent]:
        """Take in what a step drew; news for those who listen, and the ends."""
        is_own = self.slots.since[result.slots] <= result.step
        slots, tokens, finished = result.slots[is_own], result.tokens[is_own], result.finished[is_own]
        self.slots.record(slots, tokens)
        self._stats.num_generated_tokens += len(slots)
        self._note_times(slots)
        if result.logprobs is not None:
            self._events.take_logprobs(result, is_own)
        for part in result.prompt_logprobs:
            if self.slots.since[part.slot] <= result.step:
                self._events.take_prompt_logprobs(part)
        is_over = (finished != GOES_ON) | (self.slots.known[slots] >= self.slots.end[slots])
        events = []
        for position in np.flatnonzero(is_over | self.slots.is_watched[slots]).tolist():
            sequence = self.slots.sequences[slots[position]]
            assert sequence is not None
            if is_over[position]:
                events.append(self._end(sequence, int(finished[position])))
            else:
                events.append(self._events.events(sequence))
                if not sequence.request.watched:  # only its first token was news
                    self.slots.is_watched[sequence.slot] = False
        for reading in result.readings:
            if self.slots.since[reading.slot] <= result.step:
                events += self._take_reading(reading)
        return events

    def _note_times(self, slots: IntArray) -> None:
        now = self._clock()
        for slot in self._token_gaps.take(slots, now).tolist():
            sequence = self.slots.sequences[slot]
            assert sequence is not None
            sequence.first_token_at = now

    def _take_reading(self, reading: Reading) -> list[SequenceEvent]:
        sequence = self.slots.sequences[reading.slot]
        assert sequence is not None
        if not np.isfinite(reading.values).all():
            self._stats.num_finished += 1
            return [self._finish(sequence, "abort", "the model gave no valid numbers (NaN) for the prompt")]
        sequence.readings.append(reading)
        return [self._end(sequence, FULL)] if reading.is_last else []

    def _end(self, sequence: Sequence, finished: int) -> SequenceEvent:
        self._stats.num_finished += 1
        if not sequence.is_exact:
            self._forecast.learn(
                int(self.slots.known[sequence.slot]) - sequence.prompt_len, sequence.end_len - sequence.prompt_len
            )
        if finished == BROKEN:
            self._events.take_back_last(sequence)
            return self._finish(sequence, "abort", _NOTHING_TO_DRAW)
        return self._finish(sequence, "stop" if finished == STOPPED else "length")

    # ---- counting

    def _count(self, plan: StepPlan) -> None:
        stats, num_held = self._stats, self.tables.pool.num_held
        stats.num_steps += 1
        stats.num_batched_tokens += plan.num_batched_tokens
        self._batch_tokens.observe(plan.num_batched_tokens)
        stats.most_blocks_held = max(stats.most_blocks_held, num_held)
        stats.sum_blocks_held += num_held
        stats.sum_unused_slots += self.slots.num_unused_positions()

    def _count_start(self, sequence: Sequence, num_cached: int) -> None:
        stats = self._stats
        if sequence.started_at is not None:
            stats.num_recomputed_tokens += len(sequence.token_ids) - num_cached
            return
        sequence.started_at = self._clock()
        sequence.num_cached_tokens = num_cached
        if sequence.parent is None:  # a request's prompt counts once
            stats.num_prompt_tokens += sequence.prompt_len
            stats.num_prefix_queried_tokens += sequence.prompt_len
            stats.num_prefix_hit_tokens += num_cached
