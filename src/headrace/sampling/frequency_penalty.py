"""frequency_penalty: subtracted from a token's logit once for each time that the answer has the token.

The numbers added to one logit are all equal or zero, so the sum is the same in whatever order a GPU adds them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from headrace.sampling.feature import Batch, Column, SequenceSettings
from headrace.sampling.history import PROMPT_LEN, answer_tokens


class FrequencyPenalty:
    params = ("frequency_penalty",)
    columns = (Column("frequency_penalty", np.float32, 0.0), PROMPT_LEN)

    def is_used(self, sequence: SequenceSettings) -> bool:
        return sequence.params.frequency_penalty != 0.0

    def settings(self, sequence: SequenceSettings) -> Mapping[str, float]:
        return {"frequency_penalty": sequence.params.frequency_penalty, "prompt_len": sequence.prompt_len}

    def apply(self, batch: Batch, rows: Tensor) -> None:
        history = answer_tokens(batch, rows)
        penalty = batch.column("frequency_penalty", rows)[:, None].to(batch.logits.dtype)
        batch.logits.view(-1).scatter_add_(0, history.indexes.view(-1), (-penalty * history.is_token).view(-1))
