from __future__ import annotations

import numpy as np
import pytest

from headrace.sched.ngrams import following_tokens


@pytest.mark.parametrize(
    ("text", "num_tokens", "shortest", "longest", "found"),
    [
        ("abcdxbcdyabc", 3, 1, 3, "dxb"),  # the longest n-gram counts: "abc", not the later "bc"
        ("abcdxbcdyabc", 3, 1, 2, "dya"),  # of equally long ones the latest
        ("abcdxbcdyabc", 20, 1, 3, "dxbcdyabcdxbcdyabcdx"),  # what follows repeats up to here
        ("abab", 3, 2, 2, "aba"),
        ("aaa", 2, 1, 4, "aa"),
        ("abcxbd", 3, 1, 4, ""),
        ("abcxb", 2, 2, 4, ""),  # "b" occurred, "xb" did not
        ("abcxb", 2, 1, 4, "cx"),
        ("a", 2, 1, 4, ""),
    ],
)
def test_the_tokens_after_the_longest_and_latest_occurrence_are_drafted(
    text: str, num_tokens: int, shortest: int, longest: int, found: str
) -> None:
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    drafts = following_tokens(tokens, num_tokens, shortest=shortest, longest=longest)
    assert bytes(drafts.astype(np.uint8)).decode() == found
