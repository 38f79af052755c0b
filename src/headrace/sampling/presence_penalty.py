"""presence_penalty: off the logit of each token that stands in the answer, however often."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from headrace.sampling.feature import Batch, Column, Terms
from headrace.sampling.history import PROMPT_LEN, answer_tokens


class PresencePenalty:
    columns = (Column("presence_penalty", np.float32, 0.0), PROMPT_LEN)

    def is_used(self, terms: Terms) -> bool:
        return terms.params.presence_penalty != 0.0

    def settings(self, terms: Terms) -> Mapping[str, float]:
        return {"presence_penalty": terms.params.presence_penalty, "prompt_len": terms.prompt_len}

    def apply(self, batch: Batch, users: Tensor) -> None:
        history = answer_tokens(batch, users)
        penalty = batch.column("presence_penalty", users)[:, None].to(batch.logits.dtype) * history.has_any
        logits = batch.logits.view(-1)
        logits[history.places] = logits[history.places] - penalty  # the same value from every occurrence
