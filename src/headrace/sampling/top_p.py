"""top_p: keeps the fewest of the likeliest tokens that reach `top_p` of the probability that earlier filters left.

At least one token is kept; equally likely ones are kept in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.feature import Batch, Column, SequenceSettings


class TopP:
    params = ("top_p",)
    columns = (Column("top_p", np.float64, 1.0),)

    def is_used(self, sequence: SequenceSettings) -> bool:
        return sequence.params.top_p < 1.0 and not sequence.is_greedy

    def settings(self, sequence: SequenceSettings) -> Mapping[str, float]:
        return {"top_p": sequence.params.top_p}

    def apply(self, batch: Batch, rows: Tensor) -> None:
        logits, top_p = batch.logits[rows], batch.column("top_p", rows)[:, None]
        ordered, order = logits.sort(dim=1, descending=True, stable=True)  # [Q, V]
        weights = torch.exp(ordered - ordered[:, :1])
        sums = weights.cumsum(dim=1)
        drops = (sums - weights >= top_p * sums[:, -1:]) & (top_p < 1.0)  # the likelier tokens reach top_p without it
        batch.logits[rows] = logits.masked_fill(drops.scatter(1, order, drops), -torch.inf)
