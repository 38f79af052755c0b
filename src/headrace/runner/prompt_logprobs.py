"""Log-probabilities of prompt tokens: each computed token gives the distribution of the next one, which is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.models.decoder import Decoder
from headrace.sampling.columns import sent
from headrace.sampling.logprobs import Scores, scores
from headrace.steps import IntArray, SlotEntry, StepPromptLogprobs
from headrace.types import ALL_LOGPROBS

_NOT_ASKED = -1
_WHOLE = 2**31 - 1  # more than any vocabulary has
_LOGITS_AT_ONCE = 1 << 23  # about 100 MB as float32 with their log-probabilities


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """The prompt tokens of one slot that a step scores."""

    slot: int
    start: int  # position of the first scored token
    num_tokens: int
    first_token: int  # index in the step of the token before it
    num_top: int


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The tokens of a step that go through the last layer, and what each is for."""

    tokens: IntArray  # indexes in the step, ascending
    ends: IntArray  # indexes in `tokens` of those to sample after
    span_tokens: IntArray  # indexes in `tokens` of those that score the next one, span after span


@dataclass(frozen=True, slots=True)
class PendingPromptLogprobs:
    """A step's prompt log-probabilities, perhaps still on the device."""

    spans: tuple[PromptSpan, ...]
    scores: Scores

    def results(self) -> tuple[StepPromptLogprobs, ...]:
        chosen, ranks = self.scores.chosen.cpu().numpy(), self.scores.ranks.cpu().numpy()
        top_ids, top_values = self.scores.top_ids.cpu().numpy(), self.scores.top_values.cpu().numpy()
        results, start = [], 0
        for span in self.spans:
            part = slice(start, start + span.num_tokens)
            results.append(
                StepPromptLogprobs(span.slot, span.start, chosen[part], ranks[part], top_ids[part], top_values[part])
            )
            start = part.stop
        return tuple(results)


class PromptLogprobsSlots:
    """Knows, on the host, which slots want log-probabilities of their prompts."""

    def __init__(self, num_slots: int) -> None:
        self._num_top = np.full(num_slots, _NOT_ASKED, np.int64)
        self._prompt_lens = np.zeros(num_slots, np.int64)

    def enter(self, entry: SlotEntry) -> None:
        asked = entry.num_prompt_logprobs
        self._num_top[entry.slot] = _NOT_ASKED if asked is None else _WHOLE if asked == ALL_LOGPROBS else asked
        self._prompt_lens[entry.slot] = entry.prompt_len

    def spans(self, slots: IntArray, num_tokens: IntArray, positions: IntArray) -> tuple[PromptSpan, ...]:
        """What a step scores that computes `num_tokens` of each slot, from `positions` on."""
        asking = np.flatnonzero(self._num_top[slots] != _NOT_ASKED)
        if not len(asking):
            return ()
        first_tokens = np.cumsum(num_tokens) - num_tokens
        spans = []
        for index in asking.tolist():
            slot, start = int(slots[index]), int(positions[index]) + 1
            num = min(int(num_tokens[index]), int(self._prompt_lens[slot]) - start)
            if num > 0:
                spans.append(PromptSpan(slot, start, num, int(first_tokens[index]), int(self._num_top[slot])))
        return tuple(spans)


def kept_tokens(num_tokens: int, ends: IntArray, spans: Sequence[PromptSpan]) -> KeptTokens:
    """The tokens to keep of a step of `num_tokens`, which samples after those at `ends`."""
    none = np.empty(0, np.int64)
    in_spans = np.concatenate([none, *(np.arange(s.first_token, s.first_token + s.num_tokens) for s in spans)])
    is_kept = np.zeros(num_tokens, np.bool_)
    is_kept[ends] = is_kept[in_spans] = True
    index = np.cumsum(is_kept) - 1
    return KeptTokens(np.flatnonzero(is_kept), index[ends], index[in_spans])


def score_prompts(
    decoder: Decoder, hidden: Tensor, kept: KeptTokens, spans: tuple[PromptSpan, ...], tokens: Tensor
) -> PendingPromptLogprobs:
    """Score the spans from the kept tokens' `hidden` [K, H]. `tokens` [num_slots, max_len] are those of all slots."""
    slots = np.repeat([span.slot for span in spans], [span.num_tokens for span in spans])
    positions = np.concatenate([np.arange(span.start, span.start + span.num_tokens) for span in spans])
    index = sent(np.stack([kept.span_tokens, slots, positions]), hidden.device)
    num_top = max(span.num_top for span in spans)
    at_once = max(1, _LOGITS_AT_ONCE // decoder.spec.vocab_size)
    parts = []
    for kept_indexes, part_slots, part_positions in zip(*(line.split(at_once) for line in index), strict=True):
        logits = decoder.logits(hidden[kept_indexes]).float()
        parts.append(scores(logits, tokens[part_slots, part_positions].long(), num_top=num_top))
    return PendingPromptLogprobs(spans, _joined(parts))


def _joined(parts: list[Scores]) -> Scores:
    return Scores(
        torch.cat([part.chosen for part in parts]),
        torch.cat([part.ranks for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top_values for part in parts]),
    )
