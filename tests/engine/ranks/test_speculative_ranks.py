"""Speculative decoding on two ranks, in real processes: whatever is drafted, answers are those of one process without
drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, RequestOutput
from tests.engine.test_speculative import (
    EARLY_EXIT,
    NGRAM,
    PARAMS,
    _drafts_are_free,
    answers,
    comparable,
    draft_directory,
    expected,
    logprobs_of,
)

pytestmark = pytest.mark.processes
__all__ = ["_drafts_are_free", "draft_directory", "expected"]  # fixtures


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("ngram", marks=pytest.mark.slow),
        pytest.param("early_exit", marks=pytest.mark.slow),
        pytest.param("draft_model", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_with_drafts_answer_as_one_process_without(
    method: str, tiny_directory: Path, draft_directory: Path, expected: list[RequestOutput]
) -> None:
    config = {"ngram": NGRAM, "early_exit": EARLY_EXIT}.get(method, {"model": str(draft_directory)})
    settings: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "num_gpu_blocks_override": 256}
    with LLM(str(tiny_directory), speculative_config=config, tensor_parallel_size=2, **settings) as llm:
        found = answers(llm)
        assert llm.stats.scheduler.num_accepted_tokens > 0.01 * llm.stats.scheduler.num_draft_tokens > 0
    for name, ours, theirs in zip(PARAMS, comparable(found), comparable(expected), strict=True):
        assert ours == theirs, name
    assert logprobs_of(found) == pytest.approx(logprobs_of(expected), abs=1e-3)
