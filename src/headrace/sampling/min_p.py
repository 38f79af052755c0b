"""min_p: keeps the tokens at least `min_p` times as likely as the likeliest, at the row's temperature."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.feature import Batch, Column, Terms


class MinP:
    columns = (Column("min_p", np.float64, 0.0),)

    def is_used(self, terms: Terms) -> bool:
        return terms.params.min_p > 0.0 and not terms.is_greedy

    def settings(self, terms: Terms) -> Mapping[str, float]:
        return {"min_p": terms.params.min_p}

    def apply(self, batch: Batch, users: Tensor) -> None:
        logits = batch.logits[users]
        weights = torch.exp(logits - logits.amax(dim=1, keepdim=True))
        batch.logits[users] = logits.masked_fill(weights < batch.column("min_p", users)[:, None], -torch.inf)
