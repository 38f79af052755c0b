"""Decides which sequences get how many drafted tokens in a step, and learns from those that were accepted.

    decoding, few sequences ──▶ wait for the steps in flight ──▶ drafts ──▶ one step verifies them ──▶ learn
             │ many, or no drafts expected to pay
             └────────────────▶ steps of one token each, submitted ahead as ever

With N sequences a step of one token each costs 1 + N / free_rows (`Speculation`). One more drafted token of each adds
N rows and `draft_cost`, and gains a token where it is accepted, along with all before it. So the j-th draft of a
sequence pays if

    acceptance ** j  >=  N / (free_rows + N) + draft_cost

where `acceptance` is the share of the sequence's drafts that were accepted, the latest ones weighted most. What all
drafts of a step are expected to gain beyond that has to cover `wait_cost` too: a step with drafts is not submitted
ahead. Where that costs something, nothing waits for drafts that a lookup would not find either: if the last known
tokens occurred nowhere before, those in flight rarely continue anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.histogram import HistogramCounts
from headrace.sched.ngrams import following_tokens
from headrace.sched.slots import SlotTable
from headrace.sched.stats import SchedulerStats
from headrace.speculation import Speculation
from headrace.steps import Drafts, IntArray
from headrace.types import StructuredOutputs, TokenIds

FIRST_ACCEPTANCE = 0.8  # assumed until there were drafts
WEIGHT = 0.2  # of one draft against all before of the same sequence
USUAL_WEIGHT = 0.02  # of one draft against all before of all sequences
# Shares by which, in a step without drafts, a sequence's acceptance returns to the usual one, and the usual one to the
# first: text changes.
FORGETTING, USUAL_FORGETTING = 0.01, 0.002
MISSES_PER_PAUSE = 4  # lookups in a row that found nothing, for one more step without a lookup
MAX_PAUSE = 8  # steps without a lookup, at most

Lookup = Callable[[TokenIds, int], TokenIds]  # (known tokens, most to draft) -> drafted tokens


class _Found(NamedTuple):
    num_known: int  # tokens of the sequence when it was looked up
    tokens: TokenIds


_NOT_LOOKED_UP = _Found(-1, np.empty(0, np.int32))


class Drafting:
    """Owns what is known of each slot's drafts: acceptance, and how many steps to wait before the next ones."""

    def __init__(self, speculation: Speculation, slots: SlotTable, num_slots: int) -> None:
        self._speculation = speculation
        self._slots = slots
        config = speculation.config
        self.look_up: Lookup = lambda tokens, num_tokens: following_tokens(
            tokens, num_tokens, shortest=config.lookup_min, longest=config.lookup_max
        )
        self._found = [_NOT_LOOKED_UP] * num_slots
        self._acceptance = np.full(num_slots, FIRST_ACCEPTANCE)
        self._usual_acceptance = FIRST_ACCEPTANCE  # of all sequences, assumed of one until it has drafts of its own
        self._num_misses = np.zeros(num_slots, np.int64)  # lookups in a row that found nothing
        self._pause = np.zeros(num_slots, np.int64)  # decode steps until the next drafts
        self._may_draft = np.zeros(num_slots, np.bool_)
        self._drafted = np.zeros(num_slots, np.int64)  # tokens in the step in flight
        self._accepted_by_position = np.zeros(config.num_tokens, np.int64)

    def enter(self, slot: int) -> None:
        """A sequence enters the slot."""
        sequence = self._slots.sequences[slot]
        assert sequence is not None
        outputs = sequence.request.params.structured_outputs
        assert outputs is None or isinstance(outputs, StructuredOutputs)
        # A matcher can go back over drafts, but the end of the reasoning before it cannot be undone; and a stop id that
        # only the host knows would be found after the tokens that follow it.
        is_known = slot not in self._slots.with_more_stops
        self._may_draft[slot] = is_known and (outputs is None or outputs.reasoning is None)
        self._acceptance[slot] = self._usual_acceptance
        self._num_misses[slot] = self._pause[slot] = 0
        self._found[slot] = _NOT_LOOKED_UP

    def is_due(self, slots: IntArray) -> bool:
        """Whether the decoding slots are to get drafts now, by what is known of their tokens."""
        if not 0 < len(slots) <= self._speculation.max_seqs:
            return False
        lens = self._lens(slots)
        if not self._pays(slots, lens):
            return False
        looks_first = self._speculation.wait_cost and not self._speculation.drafts_on_device
        return not looks_first or self._pays(slots, self._found_lens(slots, lens))

    def pass_step(self, slots: IntArray) -> None:
        """A decode step without drafts is planned for these slots."""
        if len(slots) <= self._speculation.max_seqs:
            self._pause[slots] = np.maximum(self._pause[slots] - 1, 0)
            self._acceptance[slots] += FORGETTING * (self._usual_acceptance - self._acceptance[slots])
            self._usual_acceptance += USUAL_FORGETTING * (FIRST_ACCEPTANCE - self._usual_acceptance)

    def propose(self, slots: IntArray) -> Drafts | None:
        """The drafts of a step that decodes these slots, whose tokens are all known; None if there are none."""
        lens = np.minimum(self._lens(slots), self._slots.end[slots] - self._slots.total[slots] - 1)
        tokens = None
        if not self._speculation.drafts_on_device:
            lens = self._found_lens(slots, lens)
            if lens.any():
                found = [
                    self._found[slot].tokens[:num] for slot, num in zip(slots.tolist(), lens.tolist(), strict=True)
                ]
                tokens = np.concatenate(found).astype(np.int64)
        if not self._pays(slots, lens):
            lens[:] = 0
        self.pass_step(slots[lens == 0])
        return Drafts(lens, tokens) if lens.any() else None

    def _lens(self, slots: IntArray) -> IntArray:
        """How many drafts of each slot pay, by the rule above."""
        acceptance = np.clip(self._acceptance[slots], 0.01, 0.99)
        lens: IntArray = (np.log(min(self._least(len(slots)), 1.0)) / np.log(acceptance)).astype(np.int64)
        lens[(self._pause[slots] > 0) | ~self._may_draft[slots]] = 0
        speculation = self._speculation
        return np.minimum(lens, min(speculation.config.num_tokens, speculation.max_rows // len(slots) - 1))

    def _least(self, num_seqs: int) -> float:
        """The probability with which a draft has to be accepted to pay for itself."""
        return num_seqs / (self._speculation.free_rows + num_seqs) + self._speculation.draft_cost

    def _pays(self, slots: IntArray, lens: IntArray) -> bool:
        """Whether what the drafts gain beyond their own cost is worth a step that is not submitted ahead."""
        if not lens.any():
            return False
        acceptance = np.clip(self._acceptance[slots], 0.01, 0.99)
        accepted = acceptance * (1.0 - acceptance**lens) / (1.0 - acceptance)  # the sum of the powers 1 to lens
        gain = float(accepted.sum() - self._least(len(slots)) * lens.sum())
        return gain >= self._speculation.waiting_tokens(len(slots))

    def _found_lens(self, slots: IntArray, lens: IntArray) -> IntArray:
        """The same lengths, but of drafts that a lookup found."""
        return np.array(
            [
                min(num, len(self._find(slot))) if num else 0
                for slot, num in zip(slots.tolist(), lens.tolist(), strict=True)
            ]
        )

    def _find(self, slot: int) -> TokenIds:
        """What may follow the known tokens of a slot. It is looked up once for the same tokens."""
        tokens = self._slots.known_tokens(slot)
        if self._found[slot].num_known != len(tokens):
            self._found[slot] = _Found(len(tokens), self.look_up(tokens, self._speculation.config.num_tokens))
            self._num_misses[slot] = 0 if len(self._found[slot].tokens) else self._num_misses[slot] + 1
            self._pause[slot] = min(self._num_misses[slot] // MISSES_PER_PAUSE, MAX_PAUSE)
        return self._found[slot].tokens

    def planned(self, slots: IntArray, drafts: Drafts) -> None:
        self._drafted[slots] = drafts.lens

    def learn(self, slots: IntArray, num_sampled: IntArray, stats: SchedulerStats) -> None:
        """Take in how many tokens a step with drafts gave to each slot: the accepted ones and one more."""
        has_drafts = self._drafted[slots] > 0
        slots, accepted = slots[has_drafts], num_sampled[has_drafts] - 1
        drafted = self._drafted[slots]
        num_tested = np.minimum(accepted + 1, drafted)  # those after the first rejected one say nothing
        weight: npt.NDArray[np.float64] = 1.0 - (1.0 - WEIGHT) ** num_tested
        self._acceptance[slots] += weight * (accepted / np.maximum(num_tested, 1) - self._acceptance[slots])
        share = float(accepted.sum()) / max(1, int(num_tested.sum()))
        self._usual_acceptance += (1.0 - (1.0 - USUAL_WEIGHT) ** int(num_tested.sum())) * (
            share - self._usual_acceptance
        )
        stats.num_drafts += len(slots)
        stats.num_draft_tokens += int(drafted.sum())
        stats.num_accepted_tokens += int(accepted.sum())
        for position in range(int(accepted.max(initial=0))):
            self._accepted_by_position[position] += int((accepted > position).sum())
        stats.accepted_by_position = HistogramCounts(tuple(self._accepted_by_position.tolist()), 0.0)
