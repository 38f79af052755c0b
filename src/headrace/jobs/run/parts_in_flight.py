"""The requests of a line with several prompts, or with prompts to embed. The line has one result, for all of them.

    Work ─▶ request 0, 1, ... ─▶ engine ─▶ events of each ─▶ the last one ends ─▶ one LineOutput, committed once

If one of them fails, the others are aborted and the whole line is tried again.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from headrace.engine.answers import Answers
from headrace.engine.readouts import PendingEmbedding
from headrace.engine.start import Engine
from headrace.jobs.input.line_output import LineOutput, output_of
from headrace.types import Request

Part: TypeAlias = Answers | PendingEmbedding


class PartsInFlight:
    """Owned by the job's main loop."""

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        self._num_left = len(parts)

    def end_one(self) -> bool:
        """Note that one more part has ended. Returns whether it was the last one."""
        self._num_left -= 1
        return self._num_left == 0

    def output(self) -> LineOutput:
        """The answers of all parts, numbered one after the other as the server numbers them."""
        if isinstance(self.parts[0], PendingEmbedding):
            return _joined_embeddings([part for part in self.parts if isinstance(part, PendingEmbedding)])
        return _joined_answers([output_of(part.output()) for part in self.parts if isinstance(part, Answers)])


def part_of(request: Request, engine: Engine) -> Part:
    if request.readout is not None:
        return PendingEmbedding(request, None)
    return Answers(request, None, engine.tokenizer, engine.eos_token_ids)


def _joined_embeddings(parts: list[PendingEmbedding]) -> LineOutput:
    outputs = [part.output() for part in parts]
    return LineOutput(
        sum(len(output.prompt_token_ids) for output in outputs),
        (),
        sum(output.num_cached_tokens for output in outputs),
        tuple([output.embedding for output in outputs]),
    )


def _joined_answers(outputs: list[LineOutput]) -> LineOutput:
    answers = [answer for output in outputs for answer in output.answers]
    return LineOutput(
        sum(output.num_prompt_tokens for output in outputs),
        tuple([msgspec.structs.replace(answer, index=index) for index, answer in enumerate(answers)]),
        sum(output.num_cached_tokens for output in outputs),
    )
