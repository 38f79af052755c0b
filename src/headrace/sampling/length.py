"""max_tokens: a sequence ends when prompt and answer together reach its maximum length."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from headrace.sampling.feature import Batch, Column, SequenceSettings
from headrace.steps import FULL


class Length:
    params = ("max_tokens",)
    columns = (Column("end_len", np.int64, np.iinfo(np.int64).max),)

    def is_used(self, sequence: SequenceSettings) -> bool:
        return True

    def settings(self, sequence: SequenceSettings) -> Mapping[str, int]:
        return {"end_len": sequence.end_len}

    def mark(self, batch: Batch, rows: Tensor, tokens: Tensor, finished: Tensor) -> None:
        is_full = batch.lens[rows] + 1 >= batch.column("end_len", rows)
        finished[rows] = finished[rows].masked_fill(is_full, FULL)
