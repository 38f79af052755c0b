"""repetition_penalty: divides the logits of tokens in the prompt or the answer if positive, else multiplies them.

Every occurrence of a token writes the same value to the same logit, so occurrences need not be counted.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.feature import Batch, Column, SequenceSettings
from headrace.sampling.history import all_tokens


class RepetitionPenalty:
    params = ("repetition_penalty",)
    columns = (Column("repetition_penalty", np.float32, 1.0),)

    def is_used(self, sequence: SequenceSettings) -> bool:
        return sequence.params.repetition_penalty != 1.0

    def settings(self, sequence: SequenceSettings) -> Mapping[str, float]:
        return {"repetition_penalty": sequence.params.repetition_penalty}

    def apply(self, batch: Batch, rows: Tensor) -> None:
        indexes = all_tokens(batch, rows).indexes  # [Q, L]
        penalty = batch.column("repetition_penalty", rows)[:, None].to(batch.logits.dtype)
        logits = batch.logits.view(-1)
        values = logits[indexes]
        logits[indexes] = torch.where(values > 0, values / penalty, values * penalty)
