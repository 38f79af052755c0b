"""A sequence's own tokens as indexes into the logits, for penalties. The tokens are read where they are, on the
device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.feature import Batch, Column

PROMPT_LEN = Column("prompt_len", np.int64, 0)


@dataclass(frozen=True, slots=True)
class History:
    """The tokens of Q rows from some position on. Shorter rows repeat their first token."""

    indexes: Tensor  # [Q, L] int64, into `batch.logits.view(-1)`; of token 0 where a row has no tokens
    is_token: Tensor  # [Q, L] bool, False where it is a repeat

    @property
    def has_any(self) -> Tensor:
        return self.is_token[:, :1]  # [Q, 1]


def all_tokens(batch: Batch, rows: Tensor) -> History:
    """Returns the tokens of prompt and answer."""
    return _read(batch, rows, torch.zeros_like(rows), batch.max_len)


def answer_tokens(batch: Batch, rows: Tensor) -> History:
    """Returns the tokens of the answer."""
    return _read(batch, rows, batch.column("prompt_len", rows), batch.max_answer_len)


def _read(batch: Batch, rows: Tensor, starts: Tensor, width: int) -> History:
    assert batch.tokens is not None, "this sampler was not given the sequences' tokens"
    vocab_size = batch.logits.shape[1]
    starts = starts[:, None]
    positions = starts + torch.arange(max(1, width), device=rows.device)
    is_token = positions < batch.lens[rows, None]
    positions = torch.where(is_token, positions, starts).clamp(max=batch.tokens.shape[1] - 1)
    tokens = batch.tokens[batch.slots[rows, None], positions].long().masked_fill(~is_token[:, :1], 0)
    return History(rows[:, None] * vocab_size + tokens, is_token)
