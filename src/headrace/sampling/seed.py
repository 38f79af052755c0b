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


def sequence_seed(seed: int, index: int) -> int:
    """The seed of a request's `index`-th sequence: the request's own for the first, a well mixed one for the others."""
    if index == 0:
        return seed
    word = (seed + index * 0x9E3779B97F4A7C15) & _WORD  # splitmix64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
