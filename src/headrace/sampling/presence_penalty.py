"""presence_penalty: subtracted once from the logit of each token that the answer has, however often."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from headrace.sampling.feature import Batch, Column, SequenceSettings
from headrace.sampling.history import PROMPT_LEN, answer_tokens


class PresencePenalty:
    params = ("presence_penalty",)
    columns = (Column("presence_penalty", np.float32, 0.0), PROMPT_LEN)

    def is_used(self, sequence: SequenceSettings) -> bool:
        return sequence.params.presence_penalty != 0.0

    def settings(self, sequence: SequenceSettings) -> Mapping[str, float]:
        return {"presence_penalty": sequence.params.presence_penalty, "prompt_len": sequence.prompt_len}

    def apply(self, batch: Batch, rows: Tensor) -> None:
        history = answer_tokens(batch, rows)
        penalty = batch.column("presence_penalty", rows)[:, None].to(batch.logits.dtype) * history.has_any
        logits = batch.logits.view(-1)
        logits[history.indexes] = logits[history.indexes] - penalty  # every occurrence writes the same value
