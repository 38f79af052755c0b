"""Log-probabilities of prompts: each token that a step computes foretells the one after it, which is known already."""

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

_NOT_ASKED = -1
_LOGITS_AT_ONCE = 1 << 23  # as float32 and their log-probabilities, some 100 MB


@dataclass(frozen=True, slots=True)
class Span:
    """The part of one row's prompt that a step foretells."""

    slot: int
    start: int  # position of the first token that is foretold
    num_tokens: int
    first_token: int  # where in the step the token before it stands
    num_top: int


@dataclass(frozen=True, slots=True)
class Kept:
    """The tokens of a step that go through the last layer, and which of them are for what."""

    tokens: IntArray  # places in the step, ascending
    ends: IntArray  # places in `tokens` of those that are drawn from
    span_tokens: IntArray  # places in `tokens` of those that foretell, span after span


@dataclass(frozen=True, slots=True)
class Pending:
    """What a step found of prompts, perhaps still on the device."""

    spans: tuple[Span, ...]
    found: Scores

    def results(self) -> tuple[StepPromptLogprobs, ...]:
        chosen, ranks = self.found.chosen.cpu().numpy(), self.found.ranks.cpu().numpy()
        top_ids, top_values = self.found.top_ids.cpu().numpy(), self.found.top_values.cpu().numpy()
        parts, begin = [], 0
        for span in self.spans:
            part = slice(begin, begin + span.num_tokens)
            parts.append(
                StepPromptLogprobs(span.slot, span.start, chosen[part], ranks[part], top_ids[part], top_values[part])
            )
            begin = part.stop
        return tuple(parts)


class PromptLogprobsSlots:
    """Knows, on the host, which rows want the log-probabilities of their prompts."""

    def __init__(self, num_rows: int) -> None:
        self._num_top = np.full(num_rows, _NOT_ASKED, np.int64)
        self._prompt_lens = np.zeros(num_rows, np.int64)

    def admit(self, entry: SlotEntry) -> None:
        asked = entry.num_prompt_logprobs
        self._num_top[entry.slot] = _NOT_ASKED if asked is None else asked
        self._prompt_lens[entry.slot] = entry.prompt_len

    def spans(self, slots: IntArray, num_tokens: IntArray, positions: IntArray) -> tuple[Span, ...]:
        """What a step foretells that computes `num_tokens` of each row, from `positions` on."""
        asking = np.flatnonzero(self._num_top[slots] != _NOT_ASKED)
        if not len(asking):
            return ()
        first_tokens = np.cumsum(num_tokens) - num_tokens
        spans = []
        for place in asking.tolist():
            slot, start = int(slots[place]), int(positions[place]) + 1
            num = min(int(num_tokens[place]), int(self._prompt_lens[slot]) - start)
            if num > 0:
                spans.append(Span(slot, start, num, int(first_tokens[place]), int(self._num_top[slot])))
        return tuple(spans)


def kept_tokens(num_tokens: int, ends: IntArray, spans: Sequence[Span]) -> Kept:
    """Of a step of `num_tokens` in all, drawn from at `ends`."""
    none = np.empty(0, np.int64)
    in_spans = np.concatenate([none, *(np.arange(s.first_token, s.first_token + s.num_tokens) for s in spans)])
    is_kept = np.zeros(num_tokens, np.bool_)
    is_kept[ends] = is_kept[in_spans] = True
    place = np.cumsum(is_kept) - 1
    return Kept(np.flatnonzero(is_kept), place[ends], place[in_spans])


def foretell(decoder: Decoder, hidden: Tensor, kept: Kept, spans: tuple[Span, ...], tokens: Tensor) -> Pending:
    """`hidden` [K, H] are the kept tokens', `tokens` [num_rows, max_len] the rows' own."""
    slots = np.repeat([span.slot for span in spans], [span.num_tokens for span in spans])
    positions = np.concatenate([np.arange(span.start, span.start + span.num_tokens) for span in spans])
    index = sent(np.stack([kept.span_tokens, slots, positions]), hidden.device)
    num_top = max(span.num_top for span in spans)
    at_once = max(1, _LOGITS_AT_ONCE // decoder.spec.vocab_size)
    parts = []
    for places, part_slots, part_positions in zip(*(line.split(at_once) for line in index), strict=True):
        logits = decoder.logits(hidden[places]).float()
        parts.append(scores(logits, tokens[part_slots, part_positions].long(), num_top=num_top))
    return Pending(spans, _joined(parts))


def _joined(parts: list[Scores]) -> Scores:
    return Scores(
        torch.cat([part.chosen for part in parts]),
        torch.cat([part.ranks for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top_values for part in parts]),
    )
