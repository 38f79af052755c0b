"""top_k: keeps exactly that many of the likeliest tokens; of equally likely ones, those with the lower ids."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.feature import Batch, Column, Terms


class TopK:
    columns = (Column("top_k", np.int64, 0),)

    def is_used(self, terms: Terms) -> bool:
        return terms.params.top_k > 0 and not terms.is_greedy

    def settings(self, terms: Terms) -> Mapping[str, int]:
        return {"top_k": terms.params.top_k}

    def apply(self, batch: Batch, users: Tensor) -> None:
        logits, top_k = batch.logits[users], batch.column("top_k", users)[:, None]
        order = logits.argsort(dim=1, descending=True, stable=True)  # [Q, V]
        places = torch.arange(logits.shape[1], device=logits.device)
        drops = (places >= top_k) & (top_k > 0)  # [Q, V], in the order of likelihood
        batch.logits[users] = logits.masked_fill(drops.scatter(1, order, drops), -torch.inf)
