"""The tokens that sequences under a grammar may sample next. No torch, and no scheduler.

    step k       model k ──────────────────▶ sample k
    here         tokens of k-1 ─▶ matchers ─▶ bits ─┘        `StepMasks.bits`, between the two

Only then does the host wait for the tokens of step k-1; a GPU runs model k meanwhile. Steps without masks never wait.

A constraint lives as long as its sequence holds its slot. After a preemption the sequence gets a new one, which reads
the answer so far; tokens that were sampled and discarded are not part of it. Inside a model's reasoning every token is
allowed until its limit, if it has one; the grammar starts after it (`reasoning_gate.py`). An answer of any form has no
masks from then on.

Matchers are used by one thread, the one that calls `bits`: the device's on a CPU, the engine's on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from headrace.engine.grammars import Grammar, Grammars, explain
from headrace.engine.reasoning_gate import ReasoningGate
from headrace.steps import UNFINISHED, Bitmask, DraftsBySlot, IntArray, SlotEntry, StepPlan, StepResult
from headrace.types import StructuredOutputs

if TYPE_CHECKING:
    import llguidance

_MAX_THREADS = 32
SequenceKey = tuple[str, int]  # the request's id, and which of its sequences


@dataclass(slots=True, eq=False)
class Constraint:
    """The state of one sequence's answer in its grammar."""

    key: SequenceKey
    grammar: Grammar
    slot: int
    unread: list[int]  # tokens of the answer that the matcher has not read
    stop_token_ids: tuple[int, ...]  # tokens that end the sequence
    min_tokens: int
    gate: ReasoningGate | None = None  # until the reasoning has ended
    num_read: int = 0
    is_over: bool = False  # its sequence has ended on the device
    error: str | None = None
    _matcher: llguidance.LLMatcher | None = None

    def matcher(self) -> llguidance.LLMatcher | None:
        """The matcher, after it has read the answer so far; None if the answer has any form."""
        if self._matcher is None:
            self._matcher = self.grammar.matcher()
        if self.unread:
            tokens, self.unread = self.unread, []
            self.num_read += len(tokens)
            if self.gate is not None:
                tokens = self.gate.read(tokens)
            if tokens and self._matcher is not None:
                self._matcher.consume_tokens(tokens)
        return self._matcher

    @property
    def is_free(self) -> bool:
        """Whether the sequence is inside its reasoning, as far as its tokens were read."""
        return self.gate is not None and self.gate.is_inside

    @property
    def is_done(self) -> bool:
        """Whether every token is allowed from here on."""
        is_after = self.gate is None or self.gate.is_after
        return self.grammar.allows_all and is_after and self.num_read >= self.min_tokens


@dataclass(slots=True, eq=False)
class StepMasks:
    """The masks of one step; see `steps.Masks`."""

    slots: IntArray
    _constraints: list[Constraint]
    _fill: Callable[[list[Constraint], DraftsBySlot], Bitmask]
    _before: StepMasks | None  # the step with masks before this one, until its tokens are read
    result: Callable[[], StepResult] | None = None  # of this step; set once it is submitted
    waited_seconds: float = field(default=0.0)

    def bits(self, drafts: DraftsBySlot | None = None) -> Bitmask:
        started = perf_counter()
        self._read_before()
        self.waited_seconds = perf_counter() - started
        return self._fill(self._constraints, drafts or {})

    def _read_before(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before._read_result()

    def _read_result(self) -> None:
        """Wait for the tokens of the step, and give each to its constraint."""
        self._read_before()
        assert self.result is not None, "asked for a step that was not submitted"
        result = self.result()
        index_of = {slot: index for index, slot in enumerate(result.slots.tolist())}
        ends = None if result.num_sampled is None else np.cumsum(result.num_sampled)
        for constraint in self._constraints:
            index = index_of.get(constraint.slot)
            if index is None or result.finished[index] != UNFINISHED:
                constraint.is_over = True  # it sampled its last token in this step or before
            elif ends is None or result.num_sampled is None:
                constraint.unread.append(int(result.tokens[index]))
            else:
                constraint.unread += result.tokens[ends[index] - result.num_sampled[index] : ends[index]].tolist()


class Constraints:
    """Owns the constraints of all slots."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._executor: llguidance.LLExecutor | None = None
        self._by_slot: dict[int, Constraint] = {}
        self._slot_of: dict[SequenceKey, int] = {}
        self._last: StepMasks | None = None

    def __len__(self) -> int:
        return len(self._by_slot)

    def enter(self, entry: SlotEntry, key: SequenceKey, grammar: Grammar | None) -> None:
        """A sequence enters a slot, with its answer so far. Its grammar, if it has one, replaces that of the slot's
        former owner."""
        self._by_slot.pop(entry.slot, None)
        self.end(key)
        if grammar is None:
            return
        assert self._grammars is not None
        self._by_slot[entry.slot] = Constraint(
            key,
            grammar,
            entry.slot,
            unread=entry.token_ids[entry.prompt_len :].tolist(),
            stop_token_ids=tuple(t for t in entry.stop_token_ids if t < self._grammars.vocab_size),
            min_tokens=entry.params.min_tokens,
            gate=self._gate(entry),
        )
        self._slot_of[key] = entry.slot

    def _gate(self, entry: SlotEntry) -> ReasoningGate | None:
        outputs = entry.params.structured_outputs
        assert self._grammars is not None and isinstance(outputs, StructuredOutputs)
        if outputs.reasoning is None:
            return None
        return ReasoningGate(outputs.reasoning, self._grammars.token_bytes, self._grammars.tokens_of)

    def end(self, key: SequenceKey) -> Constraint | None:
        """A sequence has ended or changes its slot; returns the constraint that it had."""
        slot = self._slot_of.pop(key, None)
        found = None if slot is None else self._by_slot.get(slot)
        if found is None or found.key != key:  # the slot has another owner by now
            return None
        del self._by_slot[found.slot]
        if not self._by_slot:
            self._last = None
        return found

    def masks(self, plan: StepPlan) -> StepMasks | None:
        """The masks of a plan, if any slot that samples is under a constraint."""
        found = [self._by_slot[slot] for slot in plan.slots[plan.samples].tolist() if slot in self._by_slot]
        constraints = [constraint for constraint in found if not constraint.is_done]
        if not constraints:
            return None
        slots = [constraint.slot for constraint in constraints]
        self._last = StepMasks(np.array(slots, np.int64), constraints, self._fill, self._last)
        return self._last

    # ---- on the thread that samples

    def _fill(self, constraints: list[Constraint], drafts: DraftsBySlot) -> Bitmask:
        assert self._grammars is not None
        bits = np.full((len(constraints), self._grammars.num_words), -1, np.int32)
        read = [(each.matcher(), i) for i, each in enumerate(constraints) if not each.is_over]
        matchers = [(matcher, i) for matcher, i in read if matcher is not None and not constraints[i].is_free]
        if matchers:
            self._compute(matchers, bits)
        for matcher, i in matchers:
            if matcher.is_error():  # no token is allowed, which ends the sequence
                constraints[i].error = explain(matcher.get_error())
                bits[i] = 0
            elif (gate := constraints[i].gate) is not None and gate.start_token_id is not None:
                _set(bits[i], (gate.start_token_id,), True)
        for _, i in read:
            if (gate := constraints[i].gate) is not None and (forced := gate.forced_token_id) is not None:
                bits[i] = 0
                _set(bits[i], (forced,), True)
        self._allow_ends(constraints, bits)
        if not drafts:
            return bits
        return np.concatenate([self._with_drafts(bits[i], each, drafts) for i, each in enumerate(constraints)])

    def _with_drafts(self, first: Bitmask, constraint: Constraint, drafts_by_slot: DraftsBySlot) -> Bitmask:
        """The first row, and one for what may follow each draft. A draft that the row before it forbids is not sampled,
        so the rows after it are not used."""
        from llguidance.numpy import fill_next_token_bitmask

        drafts = drafts_by_slot.get(constraint.slot, ())
        rows = np.full((1 + len(drafts), len(first)), -1, np.int32)
        rows[0] = first
        if constraint.is_over or not len(drafts):
            return rows
        assert constraint.gate is None, "drafts inside a reasoning that may end there"
        read = constraint.matcher()
        assert read is not None, "an answer of any form has no masks without reasoning"
        matcher = read.deep_copy()
        for index, token in enumerate(drafts):
            if not _is_set(rows[index], token) or token in constraint.stop_token_ids:
                break
            matcher.consume_token(token)
            fill_next_token_bitmask(matcher, rows, index + 1)
            if matcher.is_error():
                constraint.error = explain(matcher.get_error())
                rows[index + 1] = 0
            self._allow_ends([constraint], rows[index + 1 : index + 2], num_drafts=index + 1)
        return rows

    def _compute(self, matchers: list[tuple[llguidance.LLMatcher, int]], bits: Bitmask) -> None:
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

        if len(matchers) == 1:
            ((matcher, i),) = matchers
            fill_next_token_bitmask(matcher, bits, i)
            return
        if self._executor is None:
            assert self._grammars is not None
            # Its threads are idle except between model and sampling.
            self._executor = LLExecutor(min(self._grammars.num_threads, _MAX_THREADS))
        fill_next_token_bitmask_par(self._executor, matchers, bits)

    def _allow_ends(self, constraints: list[Constraint], bits: Bitmask, num_drafts: int = 0) -> None:
        """Where the grammar allows the answer to end, allow the sequence's own stop tokens, but not before `min_tokens`
        unless nothing else is allowed. The rows are for what follows `num_drafts` drafts."""
        assert self._grammars is not None
        word, bit = divmod(self._grammars.end_id, 32)
        ends = bits[:, word] >> bit & 1 == 1
        bits[:, word] &= ~_BITS[bit]
        for i, constraint in enumerate(constraints):
            is_early = constraint.num_read + num_drafts < constraint.min_tokens
            if is_early and _has_more_than(constraint.stop_token_ids, bits[i]):
                _set(bits[i], constraint.stop_token_ids, False)
            elif ends[i]:
                _set(bits[i], constraint.stop_token_ids, True)


_BITS = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)


def _set(row: Bitmask, token_ids: tuple[int, ...], is_allowed: bool) -> None:
    for token in token_ids:
        if is_allowed:
            row[token >> 5] |= _BITS[token & 31]
        else:
            row[token >> 5] &= ~_BITS[token & 31]


def _is_set(row: Bitmask, token: int) -> bool:
    return bool(row[token >> 5] >> (token & 31) & 1)


def _has_more_than(token_ids: tuple[int, ...], row: Bitmask) -> bool:
    rest = row.copy()
    _set(rest, token_ids, False)
    return bool(rest.any())
