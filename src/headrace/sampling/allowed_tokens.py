"""allowed_token_ids: no other token can be drawn. A row that uses it has a bit for each token of the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.feature import Batch, Column, Terms

_ROWS_AT_ONCE = 64  # that bits are unpacked for, a byte each


class AllowedTokens:
    columns = (Column("allowed_tokens", np.uint8, 255, is_rare=True, is_bitmap=True),)

    def is_used(self, terms: Terms) -> bool:
        return terms.params.allowed_token_ids is not None

    def settings(self, terms: Terms) -> Mapping[str, Any]:
        is_allowed = np.zeros(terms.vocab_size, np.bool_)
        is_allowed[list(terms.params.allowed_token_ids or ())] = True
        return {"allowed_tokens": np.packbits(is_allowed, bitorder="little")}

    def apply(self, batch: Batch, users: Tensor) -> None:
        shifts = torch.arange(8, dtype=torch.uint8, device=users.device)
        for some in users.split(_ROWS_AT_ONCE):
            bits = (batch.column("allowed_tokens", some)[:, :, None] >> shifts) & 1  # [Q, V / 8, 8]
            is_allowed = bits.flatten(1)[:, : batch.logits.shape[1]] != 0
            batch.logits[some] = batch.logits[some].masked_fill(~is_allowed, -torch.inf)
