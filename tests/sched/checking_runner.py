"""A fake device that checks every plan, a driver for a scheduler on it, and the expected answers.

The pretend cache has two layers of memory, as a model has: the tokens themselves, and for each position a digest of
all tokens before it, as read back through the block table. The next token is a hash of the digests and the seed. So a
wrong table, a lost or early copy, a stale block or a wrong prefix changes the answer, if no check here fails first.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from time import monotonic
from zlib import crc32

import numpy as np
import pytest

from headrace.kv import BlockStore
from headrace.sched import Scheduler, SchedulerLimits
from headrace.steps import (
    FULL,
    STOPPED,
    UNFINISHED,
    BlockTransfers,
    Drafts,
    ReadoutChunk,
    ReadoutResult,
    SlotEntry,
    StepLogprobs,
    StepPlan,
    StepResult,
)
from headrace.types import FinishReason, Readout, Request, SamplingParams, SequenceEvent, TokenLogprobs

VOCAB_SIZE = 40
GARBAGE = 9_999  # the tokens that a finished slot still "samples"
TOP_WIDTH = 3


def next_token(digests: np.ndarray, seed: int) -> int:
    return crc32(digests.astype(np.uint32).tobytes(), seed & 0xFFFFFFFF) % VOCAB_SIZE


def digest(tokens: np.ndarray) -> int:
    return crc32(tokens.astype(np.int32).tobytes())


def decode_alone(prompt: Iterable[int], *, seed: int, end_len: int, stop_token_ids: Collection[int] = ()) -> list[int]:
    """The reference: one sequence, no cache, no batch."""
    tokens = list(prompt)
    prompt_len = len(tokens)
    digests = [digest(np.array(tokens[: position + 1])) for position in range(prompt_len)]
    while len(tokens) < end_len:
        tokens.append(next_token(np.array(digests), seed))
        digests.append(digest(np.array(tokens)))
        if tokens[-1] in stop_token_ids:
            break
    return tokens[prompt_len:]


def guesses() -> Callable[[np.ndarray, int], np.ndarray]:
    """Drafts that are right for one of the seeds 0 to 2, up to a random place."""
    dice = random.Random(7)

    def guess(tokens: np.ndarray, num_tokens: int) -> np.ndarray:
        end_len = len(tokens) + dice.randint(0, num_tokens)
        found = decode_alone(tokens.tolist(), seed=dice.randrange(3), end_len=end_len)
        return np.array([*found[:-1], dice.choice([*found[-1:], 5])][: len(found)], np.int32)

    return guess


def states_of(digests: np.ndarray, targets: np.ndarray | None) -> np.ndarray:
    """A position's hidden state, or its target's log-probability: a small number that depends on all before it."""
    states = digests.astype(np.int64) % 997
    return states if targets is None else -((states + targets) % 997)


def read_alone(prompt: list[int], readout: Readout) -> list[float]:
    """The reference for a readout: all of the prompt at once."""
    digests = np.array([digest(np.array(prompt[: position + 1])) for position in range(len(prompt))])
    if readout.targets is not None:
        return states_of(digests[-len(readout.targets) :], readout.targets).tolist()
    states = states_of(digests, None)
    return [float(states[-1] if readout.pooling == "last" else states.mean())]


def logprobs_of(token: int, num_top: int) -> TokenLogprobs:
    """The log-probabilities that the runner claims for a token."""
    return TokenLogprobs(
        token_id=token,
        logprob=-float(token),
        rank=token + 1,
        top_token_ids=tuple(token + place for place in range(num_top)),
        top_logprobs=tuple(-float(token + place) for place in range(num_top)),
    )


@dataclass(slots=True)
class DeviceSlot:
    """The device's state of one slot. `planned_*` follow the plans, also past an end that only the device knows."""

    entry: SlotEntry
    admitted_at: int
    tokens: list[int]
    planned_len: int
    planned_computed: int
    table: dict[int, int] = field(default_factory=dict)
    is_finished: bool = False


@dataclass(frozen=True, slots=True)
class SlotWork:
    """Positions `start`..`stop` of a slot that is not finished on the device."""

    slot: int
    start: int
    stop: int
    cells: np.ndarray  # [stop] where each position of the context lies


class CheckingRunner:
    """Computes at submission, hands out at collection, and asserts the rules between scheduler and device.

    `live_slots` says which slots have an owner: the one thing that plans do not tell.
    """

    def __init__(self, limits: SchedulerLimits, live_slots: Callable[[], Iterable[int]]) -> None:
        self._limits = limits
        self._live_slots = live_slots
        num_cells = limits.num_blocks * limits.block_size
        self._tokens = np.full(num_cells, -1, np.int32)
        self._digests = np.zeros(num_cells, np.uint32)
        self.host: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # tokens and digests, by place
        self._late_transfers: BlockTransfers | None = None
        self._slots: dict[int, DeviceSlot] = {}
        self._last: StepPlan | None = None
        self._uncollected: deque[int] = deque()
        self._sampling: dict[int, set[int]] = {}  # slots whose tokens are in a pipeline, by step
        self.is_closed = False

    def submit(self, plan: StepPlan) -> StepResult:
        self._check_plan(plan)
        self._change(plan)
        if plan.drafts is not None:
            return self._verify(plan, plan.drafts)
        work = self._advance(plan)
        self._write_tokens(plan, work)
        self._write_digests(work)
        self._last = plan
        self._sampling[plan.step] = set(plan.slots[plan.samples].tolist())
        self._uncollected.append(plan.step)
        readout_results = tuple(self._read_out(chunk) for chunk in plan.readout_chunks)
        return replace(self._sample(plan), readout_results=readout_results)

    def collect(self, ticket: StepResult) -> StepResult:
        assert self._uncollected.popleft() == ticket.step, "results are collected in the order of submission"
        del self._sampling[ticket.step]
        return ticket

    def close(self) -> None:
        assert not self._uncollected, "closed with steps in flight"
        self.is_closed = True

    # ---- the rules of a plan

    def _check_plan(self, plan: StepPlan) -> None:
        limits, slots = self._limits, plan.slots.tolist()
        assert plan.step == (0 if self._last is None else self._last.step + 1)
        assert len(set(slots)) == len(slots) <= limits.max_num_seqs
        assert len(slots) == len(plan.num_tokens) == len(plan.samples) > 0
        assert plan.num_tokens.min() >= 1
        assert plan.num_tokens.sum() == plan.num_batched_tokens <= limits.max_num_batched_tokens
        assert set(slots) <= set(self._live_slots()), "a slot without an owner is computed"
        admitted = [entry.slot for entry in plan.slot_entries]
        assert len(set(admitted)) == len(admitted)
        has_arriving = plan.transfers is not None and len(plan.transfers.in_blocks) > 0
        assert has_arriving or set(admitted) <= set(slots), "admitted, but nothing of it is computed"
        self._check_readouts(plan)
        if not limits.enable_chunked_prefill:
            assert plan.samples.sum() + len(plan.readout_chunks) == len(slots), "a prompt was chunked"
            assert not admitted or set(admitted) == set(slots), "prompts share a step with decoding"
        self._check_transfers(plan)
        if plan.is_steady:
            self._check_steady(plan)
        assert (plan.next_tokens is not None) <= (limits.num_stages > 1)
        if limits.num_stages > 1:
            self._check_microbatch(plan)

    def _check_microbatch(self, plan: StepPlan) -> None:
        """In a pipeline, a slot that decodes has its token on the host, and none of its own on the way."""
        tokens = [] if plan.next_tokens is None else plan.next_tokens.tolist()
        decoding = plan.slots[: len(tokens)].tolist()
        assert tokens == [self._slots[number].tokens[-1] for number in decoding]
        admitted_at = {number: self._slots[number].admitted_at for number in decoding}
        assert len(self._sampling) < self._limits.num_stages, "more plans in flight than stages"
        for step, sampling in self._sampling.items():
            assert not [number for number in sampling & set(decoding) if admitted_at[number] <= step]

    def _check_readouts(self, plan: StepPlan) -> None:
        computed = dict(zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True))
        assert len({chunk.slot for chunk in plan.readout_chunks}) == len(plan.readout_chunks)
        for chunk in plan.readout_chunks:
            assert chunk.first + chunk.num_tokens == computed[chunk.slot], "what is read ends with what is computed"
            assert chunk.first >= 0 and chunk.num_tokens >= 1
            assert chunk.targets is None or len(chunk.targets) == chunk.num_tokens

    def _check_steady(self, plan: StepPlan) -> None:
        assert self._last is not None
        assert plan.slots.tolist() == self._last.slots.tolist()
        assert (plan.num_tokens == 1).all()
        assert plan.samples.all()
        assert not plan.slot_entries
        assert not plan.copies
        assert not plan.readout_chunks

    def _check_transfers(self, plan: StepPlan) -> None:
        transfers = plan.transfers
        if transfers is None:
            return
        assert len(transfers.out_blocks) + len(transfers.in_blocks) > 0
        written, targets = transfers.out_places.tolist(), transfers.in_blocks.tolist()
        assert len(set(written)) == len(written), "two copies to one place of the host"
        assert len(set(targets)) == len(targets), "two copies to one block"

    # ---- the changes before a step

    def _transfer(self, transfers: BlockTransfers) -> None:
        """As late as a device may do it: what the step between has overwritten is lost."""
        for block, place in zip(transfers.out_blocks.tolist(), transfers.out_places.tolist(), strict=True):
            self.host[place] = self._tokens[self._cells_of(block)].copy(), self._digests[self._cells_of(block)].copy()
        for place, block in zip(transfers.in_places.tolist(), transfers.in_blocks.tolist(), strict=True):
            self._tokens[self._cells_of(block)], self._digests[self._cells_of(block)] = self.host[place]

    def _begin_transfers(self, plan: StepPlan) -> None:
        self.end_copies()
        self._late_transfers = plan.transfers
        if plan.transfers is not None and plan.transfers.is_urgent:
            self._transfer(plan.transfers)
            self._late_transfers = None

    def end_copies(self) -> None:
        """Make the copies that run beside the last step."""
        if self._late_transfers is not None:
            self._transfer(self._late_transfers)
            self._late_transfers = None

    def _change(self, plan: StepPlan) -> None:
        self._begin_transfers(plan)
        for entry in plan.slot_entries:
            self._admit(entry, plan.step)
        if plan.table_writes is not None:
            writes = plan.table_writes
            for slot, index, block in zip(
                writes.slots.tolist(), writes.indexes.tolist(), writes.blocks.tolist(), strict=True
            ):
                assert 0 <= block < self._limits.num_blocks
                self._slots[slot].table[index] = block
        for source, target in plan.copies:
            assert source != target
            self._tokens[self._cells_of(target)] = self._tokens[self._cells_of(source)]
            self._digests[self._cells_of(target)] = self._digests[self._cells_of(source)]

    def _admit(self, entry: SlotEntry, step: int) -> None:
        known_len = len(entry.token_ids)
        most = max(self._limits.max_model_len, entry.prompt_len + 1)
        assert 0 <= entry.num_computed < known_len < entry.end_len <= most
        assert known_len <= self._limits.max_model_len
        assert 0 < entry.prompt_len <= known_len
        self._slots[entry.slot] = DeviceSlot(
            entry=entry,
            admitted_at=step,
            tokens=entry.token_ids.tolist(),
            planned_len=known_len,
            planned_computed=entry.num_computed,
        )

    def _cells_of(self, block: int) -> slice:
        return slice(block * self._limits.block_size, (block + 1) * self._limits.block_size)

    # ---- the step itself: all slots write a layer before any slot reads it

    def _advance(self, plan: StepPlan) -> list[SlotWork]:
        work = []
        read_out = {chunk.slot for chunk in plan.readout_chunks if chunk.is_last}
        for number, num_tokens, samples in zip(
            plan.slots.tolist(), plan.num_tokens.tolist(), plan.samples.tolist(), strict=True
        ):
            slot = self._slots[number]
            start = slot.planned_computed
            slot.planned_computed += num_tokens
            assert slot.planned_computed <= slot.planned_len, "computes tokens that were never sampled"
            assert (samples or number in read_out) == (slot.planned_computed == slot.planned_len), (
                "samples too early, or not although all is computed"
            )
            assert not (samples and number in read_out)
            slot.planned_len += samples
            assert slot.planned_len <= slot.entry.end_len, "continues after its end"
            if not slot.is_finished:
                work.append(SlotWork(number, start, start + num_tokens, self._context_cells(slot, start + num_tokens)))
        return work

    def _context_cells(self, slot: DeviceSlot, context_len: int) -> np.ndarray:
        size = self._limits.block_size
        return np.array([slot.table[position // size] * size + position % size for position in range(context_len)])

    def _write_tokens(self, plan: StepPlan, work: list[SlotWork]) -> None:
        before = self._tokens.copy()
        writer_of: dict[int, int] = {}
        holders = self._holders()
        for item in work:
            slot = self._slots[item.slot]
            for position in range(item.start, item.stop):
                cell = item.cells[position]
                self._tokens[cell] = slot.tokens[position]
                if before[cell] != slot.tokens[position]:
                    block = int(cell) // self._limits.block_size
                    assert writer_of.setdefault(block, item.slot) == item.slot, (
                        f"two slots write block {block} in one step"
                    )
                    for other in holders[block] - {item.slot}:
                        self._check_reader(self._slots[other], plan.step, block, position)

    def _holders(self) -> dict[int, set[int]]:
        holders: dict[int, set[int]] = {}
        for number in self._live_slots():
            for block in self._slots[number].table.values():
                holders.setdefault(block, set()).add(number)
        return holders

    def _check_reader(self, other: DeviceSlot, step: int, block: int, position: int) -> None:
        """Another slot may hold a block that changes only if it starts in this step, and reads what is written."""
        number = other.entry.slot
        assert other.admitted_at == step, f"block {block} changes under slot {number}"
        assert other.table[position // self._limits.block_size] == block, f"slot {number} has block {block} elsewhere"
        assert position < other.entry.num_computed, f"slot {number} would write into block {block} of another slot"

    def _write_digests(self, work: list[SlotWork]) -> None:
        for item in work:
            context = self._tokens[item.cells]
            assert context.tolist() == self._slots[item.slot].tokens[: item.stop], f"slot {item.slot} reads others"
            for position in range(item.start, item.stop):
                self._digests[item.cells[position]] = digest(context[: position + 1])

    def _read_out(self, chunk: ReadoutChunk) -> ReadoutResult:
        slot = self._slots[chunk.slot]
        cells = self._context_cells(slot, slot.planned_computed)[-chunk.num_tokens :]
        states = states_of(self._digests[cells], chunk.targets)
        values = states.sum(keepdims=True) / chunk.num_pooled if chunk.targets is None else states
        return ReadoutResult(chunk.slot, chunk.is_last, values.astype(np.float32))

    # ---- drafts

    def _verify(self, plan: StepPlan, drafts: Drafts) -> StepResult:
        """Write the drafts behind the known tokens, compute all, and keep what one token at a time would give."""
        assert not self._uncollected, "drafts continue tokens that the host does not know"
        assert drafts.tokens is not None and len(drafts.lens) == len(plan.slots) and drafts.lens.any()
        assert plan.num_tokens.tolist() == (1 + drafts.lens).tolist() and plan.samples.all()
        parts = np.split(drafts.tokens, np.cumsum(drafts.lens)[:-1])
        work = [self._draft(number, part.tolist()) for number, part in zip(plan.slots.tolist(), parts, strict=True)]
        self._write_tokens(plan, work)
        self._write_digests(work)
        self._last = plan
        self._sampling[plan.step] = set(plan.slots.tolist())
        self._uncollected.append(plan.step)
        tokens, finished = zip(*(self._accept(item) for item in work), strict=True)
        counts = np.array([len(each) for each in tokens])
        flat = np.array([token for each in tokens for token in each], np.int32)
        logprobs = self._logprobs(np.repeat(plan.slots, counts), flat)
        return StepResult(plan.step, plan.slots, flat, np.array(finished, np.uint8), logprobs, num_sampled=counts)

    def _draft(self, number: int, drafts: list[int]) -> SlotWork:
        slot = self._slots[number]
        assert not slot.is_finished and slot.planned_len == len(slot.tokens) == slot.planned_computed + 1
        assert slot.planned_len + 1 + len(drafts) <= slot.entry.end_len, "drafts past the end"
        start = slot.planned_computed
        slot.tokens += drafts
        return SlotWork(number, start, len(slot.tokens), self._context_cells(slot, len(slot.tokens)))

    def _accept(self, item: SlotWork) -> tuple[list[int], int]:
        slot = self._slots[item.slot]
        drafts = slot.tokens[item.start + 1 :]
        del slot.tokens[item.start + 1 :]
        taken: list[int] = []
        while True:
            token, end = self._sample_slot(item.slot, 0)
            taken.append(token)
            if end != UNFINISHED or len(taken) > len(drafts) or drafts[len(taken) - 1] != token:
                break
        slot.planned_len, slot.planned_computed = len(slot.tokens), len(slot.tokens) - 1
        return taken, end

    def _sample(self, plan: StepPlan) -> StepResult:
        slots = plan.slots[plan.samples]
        sampled = [self._sample_slot(number, plan.step) for number in slots.tolist()]
        tokens = np.array([token for token, _ in sampled], np.int32)
        finished = np.array([end for _, end in sampled], np.uint8)
        return StepResult(plan.step, slots, tokens, finished, self._logprobs(slots, tokens))

    def _sample_slot(self, number: int, step: int) -> tuple[int, int]:
        slot = self._slots[number]
        if slot.is_finished:
            return GARBAGE, (UNFINISHED, STOPPED)[step % 2]
        token = next_token(self._digests[self._context_cells(slot, len(slot.tokens))], slot.entry.seed)
        slot.tokens.append(token)
        end = FULL if len(slot.tokens) >= slot.entry.end_len else UNFINISHED
        if token in slot.entry.stop_token_ids:
            end = STOPPED
        slot.is_finished = end != UNFINISHED
        return token, end

    def _logprobs(self, slots: np.ndarray, tokens: np.ndarray) -> StepLogprobs | None:
        asked = [self._slots[number].entry.params.logprobs is not None for number in slots.tolist()]
        if not any(asked):
            return None
        entries = [logprobs_of(token, TOP_WIDTH) for token in tokens[asked].tolist()]
        return StepLogprobs(
            slots=slots[asked],
            chosen=np.array([entry.logprob for entry in entries], np.float32),
            ranks=np.array([entry.rank for entry in entries], np.int32),
            top_ids=np.array([entry.top_token_ids for entry in entries], np.int32),
            top_values=np.array([entry.top_logprobs for entry in entries], np.float32),
        )


@dataclass(slots=True)
class Answer:
    """What the events of one sequence contained."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_events: int = 0
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    readout: list[float] | None = None


NEVER_SAMPLED = 10**6  # as a stop token: the length of the answer is then not known in advance


class Driver:
    """A scheduler on a checking runner, one call a move, and all answers so far by (request id, index)."""

    def __init__(
        self,
        limits: SchedulerLimits,
        stop_token_ids: tuple[int, ...] = (),
        *,
        clock: Callable[[], float] = monotonic,
        store: BlockStore | None = None,
    ) -> None:
        self.limits = limits
        self.stop_token_ids = stop_token_ids  # of requests that bring none
        self.scheduler = Scheduler(limits, clock=clock, store=store)
        self.runner = CheckingRunner(limits, self.live_slots)
        if self.scheduler.drafting is not None:
            self.scheduler.drafting.look_up = guesses()
        self.in_flight: deque[StepResult] = deque()
        self.answers: dict[tuple[str, int], Answer] = {}
        self._expected: dict[tuple[str, int], list[int]] = {}
        self._expected_readouts: dict[tuple[str, int], list[float] | None] = {}

    def live_slots(self) -> list[int]:
        return [sequence.slot for sequence in self.scheduler.slots.running()]

    def add(
        self, request: Request, *, seeds: tuple[int, ...] | None = None, stop_token_ids: tuple[int, ...] | None = None
    ) -> None:
        stop_token_ids = self.stop_token_ids if stop_token_ids is None else stop_token_ids
        seeds = tuple(range(request.params.n)) if seeds is None else seeds
        self.scheduler.add(request, seeds=seeds, stop_token_ids=stop_token_ids)
        prompt = request.prompt_token_ids.tolist()
        max_tokens = request.params.max_tokens if request.readout is None else 0
        end_len = (
            self.limits.max_model_len
            if max_tokens is None
            else min(self.limits.max_model_len, len(prompt) + max_tokens)
        )
        for index, seed in enumerate(seeds):
            key = (request.request_id, index)
            self.answers[key] = Answer()
            self._expected_readouts[key] = None if request.readout is None else read_alone(prompt, request.readout)
            self._expected[key] = decode_alone(prompt, seed=seed, end_len=end_len, stop_token_ids=stop_token_ids)

    def submit(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.in_flight.append(self.runner.submit(plan))
        return plan

    def collect(self) -> list[SequenceEvent]:
        if not self.in_flight:
            return []
        return self._take(self.scheduler.apply(self.runner.collect(self.in_flight.popleft())))

    def step(self, depth: int = 0) -> StepPlan | None:
        """What the engine's loop does: submit, then apply the step that is `depth` steps behind."""
        plan = self.submit()
        if plan is None or len(self.in_flight) > depth:
            self.collect()
        return plan

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceEvent]:
        return self._take(self.scheduler.abort(request_id, index))

    def drain(self, depth: int = 0, max_steps: int = 10_000) -> None:
        """Step until everything is finished."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished and not self.in_flight:
                return
            had_work = bool(self.in_flight)
            assert self.step(depth) is not None or had_work, "unfinished sequences, but nothing to do"
        raise AssertionError(f"not finished after {max_steps} steps: something starves")

    def expected(self, request_id: str, index: int = 0) -> list[int]:
        """What decoding the sequence alone gives."""
        return self._expected[request_id, index]

    def _take(self, events: list[SequenceEvent]) -> list[SequenceEvent]:
        for event in events:
            answer = self.answers[event.request_id, event.index]
            assert answer.finish_reason is None, "an event after the last one"
            answer.token_ids += event.token_ids.tolist()
            answer.logprobs += event.logprobs or ()
            answer.num_events += 1
            answer.finish_reason = event.finish_reason
            answer.num_cached_tokens = event.num_cached_tokens
            answer.readout = None if event.readout is None else event.readout.tolist()
        return events

    def check_answers(self) -> None:
        """Every sequence has ended, with exactly what it would have got alone, or a prefix of it if aborted."""
        for key, answer in self.answers.items():
            expected = self._expected[key]
            assert answer.finish_reason is not None, f"{key} never ended"
            if answer.finish_reason == "abort":
                assert answer.token_ids == expected[: len(answer.token_ids)]
            else:
                assert answer.token_ids == expected, f"{key} answered differently than alone"
                self._check_readout(key, answer.readout)

    def _check_readout(self, key: tuple[str, int], found: list[float] | None) -> None:
        expected = self._expected_readouts[key]
        if found is None or expected is None:
            assert found is expected, f"{key} has a readout, or lacks one"
        else:  # the mean of several steps is rounded in each
            assert found == pytest.approx(expected, rel=1e-6), f"{key} has another readout than alone"

    def check_blocks(self) -> None:
        """Free + idle + held = all; each block is counted once for each table that holds it."""
        pool = self.scheduler.tables.pool
        held_by = [0] * self.limits.num_blocks
        for sequence in self.scheduler.slots.running():
            assert sequence.table is not None
            assert len(set(sequence.table.blocks)) == len(sequence.table.blocks)
            for block in sequence.table.blocks:
                held_by[block] += 1
        assert [pool.count(block) for block in range(self.limits.num_blocks)] == held_by
        assert pool.num_held == sum(1 for count in held_by if count)
        assert pool.num_available + pool.num_held == self.limits.num_blocks
        assert 0 <= pool.num_idle <= pool.num_available

    def check_empty(self) -> None:
        """Nothing is left behind: every block is available and every slot is free."""
        stats = self.scheduler.stats
        assert stats.num_blocks_held == stats.num_running == stats.num_waiting == 0
        assert self.scheduler.tables.pool.num_available == self.limits.num_blocks
        assert self.scheduler.slots.num_free == self.limits.max_num_seqs
        self.check_blocks()


def make_request(request_id: str, prompt: Iterable[int], **options: object) -> Request:
    """A request; options that Request does not know are sampling parameters."""
    own = {
        name: options.pop(name)
        for name in ("priority", "cache_salt", "watched", "announced", "readout")
        if name in options
    }
    return Request(request_id, np.array(list(prompt), np.int32), SamplingParams(**options), **own)  # type: ignore[arg-type]
