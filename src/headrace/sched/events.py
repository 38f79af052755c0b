"""Builds the events of sequences: the tokens since the last event, with their log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from headrace.sched.sequence import Sequence, State
from headrace.sched.slots import SlotTable
from headrace.steps import BoolArray, StepLogprobs, StepPromptLogprobs, StepResult
from headrace.types import ALL_LOGPROBS, FinishReason, SamplingParams, SequenceEvent, TokenIds, TokenLogprobs

Values = npt.NDArray[np.float64]

MODEL_GAVE_NAN = (
    "no token could be sampled: the model gave no valid probabilities (NaN); check its weights, or use a dtype with a "
    "larger range"
)
_NO_VALID_TOKEN = (
    "no token could be sampled: the model gave no valid probabilities (NaN), or allowed_token_ids, bad_words, "
    "min_tokens and structured_outputs together forbid every token"
)


class EventWriter:
    """Reads the slots, and keeps in each sequence how much of it was delivered."""

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots

    def events(self, sequence: Sequence) -> SequenceEvent:
        return self._event(sequence, None, None)

    def last(self, sequence: Sequence, reason: FinishReason, error: str | None) -> SequenceEvent:
        return self._event(sequence, reason, error)

    def take_logprobs(self, result: StepResult, is_own: BoolArray) -> None:
        """Keep the log-probabilities of slots that asked for them, until their next event."""
        entries = result.logprobs
        assert entries is not None
        tokens_of = _tokens_by_slot(result, is_own)
        for position, slot in enumerate(entries.slots.tolist()):
            sequence = self._slots.sequences[slot]
            if slot not in tokens_of or sequence is None or sequence.logprobs is None:
                continue
            params = sequence.request.params
            sequence.logprobs.append(_entry(entries, position, next(tokens_of[slot]), params))

    def take_prompt_logprobs(self, chunk: StepPromptLogprobs) -> None:
        sequence = self._slots.sequences[chunk.slot]
        assert sequence is not None and sequence.prompt_logprobs is not None
        assert len(sequence.prompt_logprobs) == chunk.start, "a chunk of a prompt is missing"
        num_top = _num_top(sequence.request.params.prompt_logprobs)
        tokens = sequence.request.prompt_token_ids[chunk.start :]
        for position in range(len(chunk.chosen)):
            sequence.prompt_logprobs.append(
                TokenLogprobs(
                    token_id=int(tokens[position]),
                    logprob=float(chunk.chosen[position]),
                    rank=int(chunk.ranks[position]),
                    top_token_ids=tuple(chunk.top_ids[position, :num_top].tolist()),
                    top_logprobs=tuple(chunk.top_values[position, :num_top].tolist()),
                )
            )

    def take_back_last(self, sequence: Sequence) -> None:
        """Remove the last token: it was not sampled from valid probabilities."""
        self._slots.known[sequence.slot] -= 1
        if sequence.logprobs:
            sequence.logprobs.pop()

    def _event(self, sequence: Sequence, reason: FinishReason | None, error: str | None) -> SequenceEvent:
        answer = self._answer(sequence)
        is_first_or_last = reason is not None or sequence.num_delivered == 0
        new = answer[sequence.num_delivered :].copy()
        sequence.num_delivered = len(answer)
        logprobs = None
        if sequence.logprobs is not None:
            logprobs, sequence.logprobs = tuple(sequence.logprobs), []
        prompt_logprobs = None
        if sequence.prompt_logprobs is not None and not sequence.needs_prompt_logprobs:
            prompt_logprobs, sequence.prompt_logprobs = tuple(sequence.prompt_logprobs), None
        return SequenceEvent(
            request_id=sequence.request.request_id,
            index=sequence.index,
            token_ids=new,
            finish_reason=reason,
            stop_token_id=int(answer[-1]) if reason == "stop" and len(answer) else None,
            logprobs=logprobs,
            num_cached_tokens=sequence.num_cached_tokens,
            error=error,
            prompt_logprobs=prompt_logprobs,
            readout=_readout(sequence) if reason == "length" else None,
            timing=sequence.timing if is_first_or_last else None,
        )

    def _answer(self, sequence: Sequence) -> TokenIds:
        if sequence.state is State.RUNNING:
            return self._slots.known_tokens(sequence.slot)[sequence.prompt_len :]
        return sequence.token_ids[sequence.prompt_len :]


def why_broken(sequence: Sequence) -> str:
    """The error of a sequence for which no token could be sampled."""
    return _NO_VALID_TOKEN if sequence.request.params.forbids_tokens else MODEL_GAVE_NAN


def _tokens_by_slot(result: StepResult, is_own: BoolArray) -> dict[int, Iterator[int]]:
    """The tokens of each slot whose owner planned the step, in their order."""
    slots = result.slots[is_own].tolist()
    if result.num_sampled is None:
        return {slot: iter((token,)) for slot, token in zip(slots, result.tokens[is_own].tolist(), strict=True)}
    tokens = np.split(result.tokens, np.cumsum(result.num_sampled)[:-1])
    owned = [each.tolist() for each, is_one in zip(tokens, is_own, strict=True) if is_one]
    return {slot: iter(each) for slot, each in zip(slots, owned, strict=True)}


def _num_top(asked: int | None) -> int | None:
    """How many of the likeliest tokens an entry has; None: all of a result, which then has the whole vocabulary."""
    return None if asked == ALL_LOGPROBS else asked or 0


def _entry(entries: StepLogprobs, position: int, token: int, params: SamplingParams) -> TokenLogprobs:
    chosen, named = float(entries.chosen[position]), params.logprob_token_ids
    if named is None:
        num_top = _num_top(params.logprobs)
        token_ids = entries.top_ids[position, :num_top].tolist()
        values = entries.top_values[position, :num_top].tolist()
    else:  # the tokens that the request named, and the sampled one
        assert entries.named_values is not None
        token_ids, values = list(named), entries.named_values[position, : len(named)].tolist()
        if token not in named:
            token_ids, values = [token, *token_ids], [chosen, *values]
    return TokenLogprobs(token, chosen, int(entries.ranks[position]), tuple(token_ids), tuple(values))


def _readout(sequence: Sequence) -> Values | None:
    """Combine the readout results of a sequence's steps."""
    readout = sequence.request.readout
    if readout is None:
        return None
    values = [readout_result.values for readout_result in sequence.readout_results]
    if readout.targets is not None:
        return np.concatenate(values, dtype=np.float64)
    mean: Values = np.sum(values, axis=0, dtype=np.float64)
    return mean
