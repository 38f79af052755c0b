"""Drafts tokens by n-gram lookup: what followed the last tokens of a sequence where they occurred before."""

from __future__ import annotations

import numpy as np

from headrace.types import TokenIds

_NOTHING: TokenIds = np.empty(0, np.int32)


def following_tokens(tokens: TokenIds, num_tokens: int, *, shortest: int, longest: int) -> TokenIds:
    """The `num_tokens` that followed the latest earlier occurrence of the last tokens, of which the longest n-gram
    between `shortest` and `longest` counts; empty if none occurred before.

        a b c d x b c d y a b c ?        longest=3: "a b c" occurred at the start, and d x b followed
        a b a b ?                        "a b" was followed by itself: a b a
    """
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1  # where the token after each earlier occurrence is
    length, found = 1, ends if shortest == 1 else ends[:0]
    while len(ends) and length < min(longest, len(tokens) - 1):
        ends = ends[ends > length]
        ends = ends[tokens[ends - length - 1] == tokens[-length - 1]]
        length += 1
        if len(ends) and length >= shortest:
            found = ends
    if not len(found):
        return _NOTHING
    first = int(found[-1])
    return tokens[first + np.arange(num_tokens) % (len(tokens) - first)]
