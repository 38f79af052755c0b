"""How decode attention splits contexts."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from headrace.kernels.layout import Splits
from headrace.runner.gpu.context_splits import splits_of


def test_contexts_are_split_where_programs_would_be_few_or_one_would_run_alone() -> None:
    assert splits_of(1, 8, 128, 131072) == Splits(32, 64)
    assert splits_of(16, 8, 128, 131072) == Splits(4, 64)
    assert splits_of(512, 8, 128, 131072) == Splits(4, 1024, num_seqs=32)
    assert splits_of(1024, 8, 128, 131072) == Splits(4, 1024, num_seqs=64)
    assert splits_of(320, 8, 128, 4096) == Splits()  # the longest is read before the others are done
    assert splits_of(256, 8, 128, 4096) == Splits(4, 512, num_seqs=32)
    assert splits_of(512, 4, 128, 4096) == Splits(4, 512, num_seqs=32)
    assert splits_of(30, 4, 128, 4096) == Splits(8, 64)
    assert splits_of(512, 8, 64, 4096) == Splits(4, 1024, num_seqs=32)
    assert splits_of(512, 8, 64, 1024) == Splits()
