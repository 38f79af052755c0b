"""allowed_token_ids: no other token can be sampled. A slot that uses it has one bit per token of the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.feature import Batch, Column, SequenceSettings

_MAX_ROWS_AT_ONCE = 64  # bits are unpacked for so many rows at a time, to one number each


class AllowedTokens:
    params = ("allowed_token_ids",)
    columns = (Column("allowed_tokens", np.uint8, 255, is_rare=True, is_bitmap=True),)

    def is_used(self, sequence: SequenceSettings) -> bool:
        return sequence.params.allowed_token_ids is not None

    def settings(self, sequence: SequenceSettings) -> Mapping[str, Any]:
        is_allowed = np.zeros(sequence.vocab_size, np.bool_)
        is_allowed[list(sequence.params.allowed_token_ids or ())] = True
        return {"allowed_tokens": np.packbits(is_allowed, bitorder="little")}

    def apply(self, batch: Batch, rows: Tensor) -> None:
        if batch.logits.is_cuda:
            from headrace.kernels.gpu.allowed_tokens import keep_allowed

            keep_allowed(batch.logits, rows, batch.slots, batch.columns["allowed_tokens"])
        else:
            self.apply_reference(batch, rows)

    def apply_reference(self, batch: Batch, rows: Tensor) -> None:
        """Computes what the GPU kernel computes, in plain PyTorch."""
        byte_values = torch.arange(256, device=rows.device)[:, None]
        bits = (byte_values >> torch.arange(8, device=rows.device)) & 1
        by_byte = torch.where(bits == 1, 0.0, -torch.inf).to(batch.logits.dtype)  # [256, 8], to be added
        for part in rows.split(_MAX_ROWS_AT_ONCE):
            bans = by_byte[batch.column("allowed_tokens", part).long()].flatten(1)  # [Q, V rounded up]
            batch.logits.index_add_(0, part, bans[:, : batch.logits.shape[1]])
