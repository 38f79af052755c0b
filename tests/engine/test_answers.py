"""Answers that are built from events, however many tokens these have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace import SamplingParams
from headrace.engine.answers import Answers
from headrace.types import CompletionOutput, Request, SequenceEvent, TokenLogprobs
from tests.text.builders import byte_tokenizer

TEXT = "one two three two one"


def answered(num_at_once: int, params: SamplingParams) -> CompletionOutput:
    """The answer TEXT, in events of so many tokens."""
    tokenizer = byte_tokenizer()
    answers = Answers(Request("r", np.array([1], np.int32), params), None, tokenizer, eos_token_ids=())
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    for start in range(0, len(tokens), num_at_once):
        part = tokens[start : start + num_at_once]
        finish_reason = "length" if start + num_at_once >= len(tokens) else None
        logprobs = tuple(TokenLogprobs(token, -1.0, 1) for token in part)
        answers.take(SequenceEvent("r", 0, np.array(part, np.int32), finish_reason, logprobs=logprobs))  # type: ignore[arg-type]
    (answer,) = answers.output().outputs
    return answer


@pytest.mark.parametrize("num_at_once", [2, 3, 5, 100])
@pytest.mark.parametrize(
    "params",
    [
        {"stop": ["two"]},
        {"stop": ["two"], "include_stop_str_in_output": True},
        {"stop": ["e"], "min_tokens": 8},
        {"stop": ["not in it"]},
    ],
)
def test_an_answer_with_a_stop_string_is_the_same_for_tokens_that_come_together(
    num_at_once: int, params: dict[str, Any]
) -> None:
    given = SamplingParams(logprobs=0, **params)
    assert answered(num_at_once, given) == answered(1, given)
