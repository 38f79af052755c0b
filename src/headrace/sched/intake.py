"""Takes the tokens that a step has sampled into the slots, and finds the sequences that they end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.sched.drafting import Drafting
from headrace.sched.events import EventWriter
from headrace.sched.slots import SlotTable
from headrace.sched.stats import SchedulerStats
from headrace.steps import BROKEN, STOPPED, UNFINISHED, BoolArray, IntArray, StepResult


class Taken(NamedTuple):
    """The results of a step that belong to the present owners of their slots."""

    slots: IntArray
    finished: npt.NDArray[np.uint8]
    is_over: BoolArray


class Intake:
    """Works on whole arrays; a slot costs extra only with log-probabilities or many stop ids."""

    def __init__(self, slots: SlotTable, events: EventWriter, drafting: Drafting | None, stats: SchedulerStats) -> None:
        self._slots = slots
        self._events = events
        self._drafting = drafting
        self._stats = stats

    def take(self, result: StepResult) -> Taken:
        is_own = self._slots.since[result.slots] <= result.step
        slots, finished = result.slots[is_own], result.finished[is_own]
        self._record(result, is_own)
        if result.logprobs is not None:
            self._events.take_logprobs(result, is_own)
        for chunk in result.prompt_logprobs:
            if self._slots.since[chunk.slot] <= result.step:
                self._events.take_prompt_logprobs(chunk)
        if self._slots.with_more_stops and result.num_sampled is None:  # such sequences have no drafts
            self._find_more_stops(slots, result.tokens[is_own], finished)
        is_over = (finished != UNFINISHED) | (self._slots.known[slots] >= self._slots.end[slots])
        return Taken(slots, finished, is_over)

    def _record(self, result: StepResult, is_own: BoolArray) -> None:
        slots, num_sampled = result.slots[is_own], result.num_sampled
        if num_sampled is None:
            self._stats.num_generated_tokens += len(slots)
            self._slots.record(slots, result.tokens[is_own])
            return
        assert self._drafting is not None
        tokens = result.tokens[np.repeat(is_own, num_sampled)]
        self._stats.num_generated_tokens += len(tokens)
        self._slots.record_several(slots, tokens, num_sampled[is_own])
        self._drafting.learn(slots, num_sampled[is_own], self._stats)

    def _find_more_stops(self, slots: IntArray, tokens: IntArray, finished: npt.NDArray[np.uint8]) -> None:
        """Mark sequences whose token is a stop id that the device does not know."""
        for position, slot in enumerate(slots.tolist()):
            if slot not in self._slots.with_more_stops or finished[position] == BROKEN:
                continue
            sequence = self._slots.sequences[slot]
            assert sequence is not None
            if int(tokens[position]) in sequence.stop_token_ids:
                finished[position] = STOPPED
