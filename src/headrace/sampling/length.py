"""max_tokens: a sequence ends when prompt and answer together reach its maximum length."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headrace.sampling.feature import Column, SequenceSettings


class Length:
    params = ("max_tokens",)
    columns = (Column("end_len", np.int64, np.iinfo(np.int64).max),)

    def is_used(self, sequence: SequenceSettings) -> bool:
        return True

    def settings(self, sequence: SequenceSettings) -> Mapping[str, int]:
        return {"end_len": sequence.end_len}
