"""repetition_penalty: what stands in the prompt or the answer has its logit divided by it if positive, else multiplied.

Every occurrence of a token writes the same value to the same place, so none has to be counted.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.feature import Batch, Column, Terms
from headrace.sampling.history import all_tokens


class RepetitionPenalty:
    columns = (Column("repetition_penalty", np.float32, 1.0),)

    def is_used(self, terms: Terms) -> bool:
        return terms.params.repetition_penalty != 1.0

    def settings(self, terms: Terms) -> Mapping[str, float]:
        return {"repetition_penalty": terms.params.repetition_penalty}

    def apply(self, batch: Batch, users: Tensor) -> None:
        places = all_tokens(batch, users).places  # [Q, L]
        penalty = batch.column("repetition_penalty", users)[:, None].to(batch.logits.dtype)
        logits = batch.logits.view(-1)
        values = logits[places]
        logits[places] = torch.where(values > 0, values / penalty, values * penalty)
