"""logit_bias: the user's numbers, added to the logits of the tokens that they name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from headrace.sampling.feature import Batch, Column, SequenceSettings
from headrace.types import MAX_LOGIT_BIAS


class LogitBias:
    params = ("logit_bias",)
    columns = (
        Column("bias_token_ids", np.int64, 0, width=MAX_LOGIT_BIAS, is_rare=True),
        Column("biases", np.float32, 0.0, width=MAX_LOGIT_BIAS, is_rare=True),  # 0 where a slot has fewer
    )

    def is_used(self, sequence: SequenceSettings) -> bool:
        return bool(sequence.params.logit_bias)

    def settings(self, sequence: SequenceSettings) -> Mapping[str, Any]:
        given = sequence.params.logit_bias or {}
        token_ids, biases = np.zeros(MAX_LOGIT_BIAS, np.int64), np.zeros(MAX_LOGIT_BIAS, np.float32)
        token_ids[: len(given)], biases[: len(given)] = list(given), list(given.values())
        return {"bias_token_ids": token_ids, "biases": biases}

    def apply(self, batch: Batch, rows: Tensor) -> None:
        indexes = rows[:, None] * batch.logits.shape[1] + batch.column("bias_token_ids", rows)
        biases = batch.column("biases", rows).to(batch.logits.dtype)
        batch.logits.view(-1).scatter_add_(0, indexes.view(-1), biases.view(-1))
