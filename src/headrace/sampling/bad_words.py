"""bad_words: a token that would complete one of these sequences within the answer cannot be sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.feature import Batch, Column, SequenceSettings
from headrace.sampling.history import PROMPT_LEN
from headrace.sampling.stop_tokens import NO_TOKEN
from headrace.types import MAX_BAD_WORD_LEN, MAX_BAD_WORDS

_BEFORE_ANSWER = -2  # replaces tokens of the prompt, and matches nothing


class BadWords:
    params = ("bad_words_token_ids",)
    # Words one after the other, each padded on the left: NO_TOKEN ... NO_TOKEN first ... last.
    columns = (
        Column("bad_words", np.int32, NO_TOKEN, width=MAX_BAD_WORDS * MAX_BAD_WORD_LEN, is_rare=True),
        PROMPT_LEN,
    )

    def is_used(self, sequence: SequenceSettings) -> bool:
        return bool(sequence.params.bad_words_token_ids)

    def settings(self, sequence: SequenceSettings) -> Mapping[str, Any]:
        words = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_LEN), NO_TOKEN, np.int32)
        for index, word in enumerate(sequence.params.bad_words_token_ids):
            words[index, MAX_BAD_WORD_LEN - len(word) :] = word
        return {"bad_words": words.reshape(-1), "prompt_len": sequence.prompt_len}

    def apply(self, batch: Batch, rows: Tensor) -> None:
        words = batch.column("bad_words", rows).view(-1, MAX_BAD_WORDS, MAX_BAD_WORD_LEN)  # [Q, W, L]
        prefixes, lasts = words[:, :, :-1], words[:, :, -1].long()
        matches = ((prefixes == NO_TOKEN) | (prefixes == _last_tokens(batch, rows)[:, None])).all(dim=2)
        is_bad = matches & (lasts != NO_TOKEN)
        # A minimum with +inf changes nothing: shapes stay fixed, and the device never waits for the host.
        ceilings = torch.where(is_bad, -torch.inf, torch.inf).to(batch.logits.dtype)
        indexes = rows[:, None] * batch.logits.shape[1] + lasts.clamp(min=0)
        batch.logits.view(-1).scatter_reduce_(0, indexes.view(-1), ceilings.view(-1), "amin")


def _last_tokens(batch: Batch, rows: Tensor) -> Tensor:
    """Returns the last tokens of each row's answer, [Q, MAX_BAD_WORD_LEN - 1]."""
    assert batch.tokens is not None, "this sampler was not given the sequences' tokens"
    back = torch.arange(1 - MAX_BAD_WORD_LEN, 0, device=rows.device)
    positions = batch.lens[rows, None] + back
    is_answer = positions >= batch.column("prompt_len", rows)[:, None]
    tokens = batch.tokens[batch.slots[rows, None], positions.clamp(min=0)]
    return torch.where(is_answer, tokens, _BEFORE_ANSWER)
