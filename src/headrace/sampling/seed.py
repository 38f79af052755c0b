"""seed: the random numbers of a sequence depend on its seed and the token's position, and on nothing else."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headrace.sampling.feature import Column, SequenceSettings

_WORD = 2**64 - 1


class Seed:
    params = ("seed",)
    columns = (Column("seed", np.int64, 0),)  # 64 bits, the upper half of the range as negative numbers

    def is_used(self, sequence: SequenceSettings) -> bool:
        return not sequence.is_greedy

    def settings(self, sequence: SequenceSettings) -> Mapping[str, int]:
        word = sequence.seed & _WORD
        return {"seed": word - 2**64 if word >= 2**63 else word}
