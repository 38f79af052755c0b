"""min_p: keeps the tokens at least `min_p` times as likely as the likeliest, at the sequence's temperature."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.feature import Batch, Column, SequenceSettings


class MinP:
    params = ("min_p",)
    columns = (Column("min_p", np.float64, 0.0),)

    def is_used(self, sequence: SequenceSettings) -> bool:
        return sequence.params.min_p > 0.0 and not sequence.is_greedy

    def settings(self, sequence: SequenceSettings) -> Mapping[str, float]:
        return {"min_p": sequence.params.min_p}

    def apply(self, batch: Batch, rows: Tensor) -> None:
        logits = batch.logits[rows]
        weights = torch.exp(logits - logits.amax(dim=1, keepdim=True))
        batch.logits[rows] = logits.masked_fill(weights < batch.column("min_p", rows)[:, None], -torch.inf)
