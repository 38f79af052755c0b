"""top_k: keeps exactly that many of the likeliest tokens; of equally likely ones, those with the lower ids."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.feature import Batch, Column, SequenceSettings


class TopK:
    params = ("top_k",)
    columns = (Column("top_k", np.int64, 0),)

    def is_used(self, sequence: SequenceSettings) -> bool:
        return sequence.params.top_k > 0 and not sequence.is_greedy

    def settings(self, sequence: SequenceSettings) -> Mapping[str, int]:
        return {"top_k": sequence.params.top_k}

    def apply(self, batch: Batch, rows: Tensor) -> None:
        logits, top_k = batch.logits[rows], batch.column("top_k", rows)[:, None]
        order = logits.argsort(dim=1, descending=True, stable=True)  # [Q, V]
        ranks = torch.arange(logits.shape[1], device=logits.device)
        drops = (ranks >= top_k) & (top_k > 0)  # [Q, V], in the order of likelihood
        batch.logits[rows] = logits.masked_fill(drops.scatter(1, order, drops), -torch.inf)
