"""Seeds: a row's random numbers belong to its seed and the position of the token, and to nothing else."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headrace.sampling.feature import Column, Terms

_WORD = 2**64 - 1


class Seed:
    columns = (Column("seed", np.int64, 0),)  # 64 bits, the upper half of the range as negative numbers

    def is_used(self, terms: Terms) -> bool:
        return not terms.is_greedy

    def settings(self, terms: Terms) -> Mapping[str, int]:
        word = terms.seed & _WORD
        return {"seed": word - 2**64 if word >= 2**63 else word}
