"""min_tokens: no stop token can be sampled until the answer has that many tokens.

Sequences under a grammar have this in their masks: there, a complete answer may end earlier.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.feature import Batch, Column, SequenceSettings
from headrace.sampling.stop_tokens import NO_TOKEN


class MinTokens:
    params = ("min_tokens",)
    columns = (Column("min_len", np.int64, 0),)  # prompt and answer together

    def is_used(self, sequence: SequenceSettings) -> bool:
        params = sequence.params
        return params.min_tokens > 0 and bool(sequence.stop_token_ids) and params.structured_outputs is None

    def settings(self, sequence: SequenceSettings) -> Mapping[str, int]:
        return {"min_len": sequence.prompt_len + sequence.params.min_tokens}

    def apply(self, batch: Batch, rows: Tensor) -> None:
        stop_ids = batch.column("stop_token_ids", rows)  # [Q, width]
        is_early = batch.lens[rows] < batch.column("min_len", rows)
        masks = is_early[:, None] & (stop_ids != NO_TOKEN)
        # A minimum with +inf changes nothing: shapes stay fixed, and the device never waits for the host.
        ceilings = torch.where(masks, -torch.inf, torch.inf).to(batch.logits.dtype)
        indexes = rows[:, None] * batch.logits.shape[1] + stop_ids.clamp(min=0)
        batch.logits.view(-1).scatter_reduce_(0, indexes.view(-1), ceilings.view(-1), "amin")
