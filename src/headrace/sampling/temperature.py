"""temperature: divides the logits, before any filter. A column value of 0 means greedy: the first of the largest
logits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from headrace.sampling.feature import Batch, Column, SequenceSettings


class Temperature:
    params = ("temperature",)
    columns = (Column("temperature", np.float64, 1.0),)

    def is_used(self, sequence: SequenceSettings) -> bool:
        return sequence.params.temperature != 1.0

    def settings(self, sequence: SequenceSettings) -> Mapping[str, float]:
        return {"temperature": 0.0 if sequence.is_greedy else sequence.params.temperature}

    def apply(self, batch: Batch, rows: Tensor) -> None:
        temperature = batch.column("temperature", rows)
        temperature = temperature.masked_fill(temperature == 0.0, 1.0)[:, None]  # greedy rows do not use the result
        logits = batch.logits[rows]
        batch.logits[rows] = (logits - logits.amax(dim=1, keepdim=True)) / temperature
