"""The requests of a line with several prompts, or with prompts to embed or score. They give one result, the line's.

    Work ─▶ request 0, 1, ... ─▶ engine ─▶ events of each ─▶ the last one ends ─▶ one LineOutput, committed once

If one of them fails, the others are aborted and the whole line is tried again.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from headrace.engine.answers import Answers
from headrace.engine.readouts import PendingPooling, PendingReadout, pending_pooling
from headrace.engine.start import Engine
from headrace.jobs.input.line_output import LineOutput, output_of
from headrace.jobs.input.prepare import LineParts
from headrace.types import Request

Part: TypeAlias = Answers | PendingPooling


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
        if isinstance(self.parts[0], PendingReadout):
            return _joined_values([part for part in self.parts if not isinstance(part, Answers)])
        return _joined_answers([output_of(part.output()) for part in self.parts if isinstance(part, Answers)])


def part_of(request: Request, engine: Engine, parts: LineParts) -> Part:
    if request.readout is not None:
        return pending_pooling(
            request, None, engine.spec.pooler, use_activation=parts.use_activation, dimensions=parts.dimensions
        )
    return Answers(request, None, engine.tokenizer, engine.eos_token_ids)


def _joined_values(parts: list[PendingPooling]) -> LineOutput:
    return LineOutput(
        sum(len(part.request.prompt_token_ids) for part in parts),
        (),
        sum(part.num_cached_tokens for part in parts),
        tuple([part.pooled() for part in parts]),
    )


def _joined_answers(outputs: list[LineOutput]) -> LineOutput:
    answers = [answer for output in outputs for answer in output.answers]
    return LineOutput(
        sum(output.num_prompt_tokens for output in outputs),
        tuple([msgspec.structs.replace(answer, index=index) for index, answer in enumerate(answers)]),
        sum(output.num_cached_tokens for output in outputs),
    )
