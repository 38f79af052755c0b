"""The answers of a line: the parts of an engine's output that its reply writes, without token ids.

There is one for each line, and many are kept for duplicates, so these are Structs.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.text import Tokenizer, whole_text
from headrace.types import FinishReason, Request, RequestOutput, SamplingParams, SequenceEvent, TokenLogprobs


class LineAnswer(msgspec.Struct, frozen=True, gc=False):
    """One of a line's `n` answers."""

    index: int
    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it


class LineOutput(msgspec.Struct, frozen=True, gc=False):
    num_prompt_tokens: int
    answers: tuple[LineAnswer, ...]  # of all prompts, in their order; none if the prompts were embedded or scored
    num_cached_tokens: int = 0
    pooled: tuple[npt.NDArray[np.float32], ...] = ()  # embeddings, or outputs of a classifier, of each prompt

    @property
    def num_generated_tokens(self) -> int:
        answers = self.answers
        return answers[0].num_tokens if len(answers) == 1 else sum([answer.num_tokens for answer in answers])


def output_of(output: RequestOutput) -> LineOutput:
    return LineOutput(
        len(output.prompt_token_ids),
        tuple(
            LineAnswer(
                answer.index,
                answer.text,
                len(answer.token_ids),
                answer.finish_reason,
                answer.logprobs,
                answer.stop_reason,
            )
            for answer in output.outputs
        ),
        output.num_cached_tokens,
    )


def ends_with_one_event(params: SamplingParams) -> bool:
    """Whether an unwatched request produces a single event, at its end, which `output_at_end` can read."""
    has_stops = params.stop or params.stop_token_ids  # `stop_reason` names them
    return not has_stops and params.detokenize and params.num_sequences == 1 and params.logprobs is None


def output_at_end(request: Request, event: SequenceEvent, tokenizer: Tokenizer | None) -> LineOutput:
    """The same output that `Answers` would make of the single event, in a fraction of the time."""
    prompt, params, tokens = request.prompt_token_ids, request.params, event.token_ids.tolist()
    num_tokens = len(tokens)
    if event.stop_token_id is not None and not params.include_stop_str_in_output:
        tokens.pop()
    text = ""
    if tokenizer is not None:
        text = whole_text(tokenizer, prompt, tokens, params.skip_special_tokens)
    return LineOutput(len(prompt), (LineAnswer(0, text, num_tokens, event.finish_reason),), event.num_cached_tokens)
