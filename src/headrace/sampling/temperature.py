"""Temperature: logits over it, before any filter. A column of 0 means greedy: the first of the largest logits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from headrace.sampling.feature import Batch, Column, Terms


class Temperature:
    columns = (Column("temperature", np.float64, 1.0),)

    def is_used(self, terms: Terms) -> bool:
        return terms.params.temperature != 1.0

    def settings(self, terms: Terms) -> Mapping[str, float]:
        return {"temperature": 0.0 if terms.is_greedy else terms.params.temperature}

    def apply(self, batch: Batch, users: Tensor) -> None:
        temperature = batch.column("temperature", users)
        temperature = temperature.masked_fill(temperature == 0.0, 1.0)[:, None]  # greedy rows are not drawn from these
        logits = batch.logits[users]
        batch.logits[users] = (logits - logits.amax(dim=1, keepdim=True)) / temperature
