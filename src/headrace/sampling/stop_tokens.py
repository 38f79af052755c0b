"""Stop token ids, end of sequence among them: drawing one ends the sequence."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from headrace.errors import RequestError
from headrace.sampling.feature import Batch, Column, Terms
from headrace.steps import STOPPED
from headrace.types import MAX_STOP_TOKEN_IDS

NO_TOKEN = -1  # fills the column where a row has fewer stop ids than it is wide


class StopTokens:
    columns = (Column("stop_token_ids", np.int64, NO_TOKEN, width=MAX_STOP_TOKEN_IDS),)

    def is_used(self, terms: Terms) -> bool:
        return bool(terms.stop_token_ids)

    def settings(self, terms: Terms) -> Mapping[str, tuple[int, ...]]:
        ids = terms.stop_token_ids
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids can be at most {MAX_STOP_TOKEN_IDS}, end of sequence included, got {len(ids)}; "
                "use stop strings for the rest",
                param="stop_token_ids",
            )
        return {"stop_token_ids": ids + (NO_TOKEN,) * (MAX_STOP_TOKEN_IDS - len(ids))}

    def mark(self, batch: Batch, users: Tensor, tokens: Tensor, finished: Tensor) -> None:
        is_stop = (batch.column("stop_token_ids", users) == tokens[users, None]).any(dim=1)
        finished[users] = finished[users].masked_fill(is_stop, STOPPED)
