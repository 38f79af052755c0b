"""When contexts are gathered, and how they are grouped."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.runner.gpu.context_gather import groups_of, is_gather_faster, max_gathered_tokens


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(50, 200))
def test_groups_hold_every_context_once_and_are_as_large_as_may_be(lens: list[int], max_tokens: int) -> None:
    groups = groups_of(np.array(lens, np.int64), max_tokens)
    assert [index for group in groups for index in range(group.start, group.stop)] == list(range(len(lens)))
    sums = [sum(lens[group]) for group in groups]
    assert all(0 < total <= max_tokens for total in sums)
    assert all(total + lens[group.stop] > max_tokens for total, group in zip(sums[:-1], groups[:-1], strict=True))


def test_the_longest_context_of_the_model_can_be_gathered() -> None:
    assert max_gathered_tokens(8192, 4096) == 65536
    assert max_gathered_tokens(8192, 131072) == 131072
    assert groups_of(np.array([131072, 1]), 131072) == [slice(0, 1), slice(1, 2)]


@pytest.mark.parametrize(
    ("num_tokens", "context", "head_dim", "cache_bytes", "is_faster"),
    [
        (128, 1664, 128, 2, True),  # 463 us against 536 as measured
        (128, 1664, 128, 1, True),  # 417 against 657
        (128, 1664, 64, 2, False),  # 316 against 294
        (2048, 4096, 64, 2, True),  # 447 against 556
        (2048, 4096, 128, 2, True),  # 633 against 1,024
        (32, 632, 64, 2, True),  # 233 against 423: most of a program that reads blocks would be padding
    ],
)
def test_contexts_are_gathered_where_that_was_measured_to_be_faster(
    num_tokens: int, context: int, head_dim: int, cache_bytes: int, is_faster: bool
) -> None:
    tokens, contexts = np.full(50, num_tokens), np.full(50, context)
    found = is_gather_faster(tokens, contexts, num_heads=32, num_kv_heads=8, head_dim=head_dim, cache_bytes=cache_bytes)
    assert found is is_faster


def test_nothing_is_gathered_without_prefill_continuations() -> None:
    none = np.zeros(0, np.int64)
    assert not is_gather_faster(none, none, num_heads=32, num_kv_heads=8, head_dim=128, cache_bytes=2)
