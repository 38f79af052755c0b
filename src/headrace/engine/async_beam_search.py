"""Beam search over an `AsyncEngine`: each search step is a stream of requests for one token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.engine.answer_stream import AnswerStream
from headrace.engine.answers import Answers
from headrace.engine.beam_search import BeamSearchOutput, BeamSearchParams, search_steps
from headrace.engine.prompts import PromptReader, TokenizedPrompt
from headrace.types import SamplingParams

Prepare = Callable[[TokenizedPrompt, SamplingParams], Answers]


class StreamSource(Protocol):
    """What a search needs of the engine."""

    @property
    def reader(self) -> PromptReader: ...

    def open(self, requests: Sequence[Answers]) -> AnswerStream: ...


async def search_beams(
    engine: StreamSource,
    prompt: TokenizedPrompt,
    params: BeamSearchParams,
    *,
    eos_token_ids: tuple[int, ...],
    prepare: Prepare,
    opened: Callable[[AnswerStream], None] | None,
) -> BeamSearchOutput:
    """Return the best beams. `prepare` makes the request of a beam; each stream is passed to `opened`."""
    search = search_steps([tuple(prompt.token_ids.tolist())], params, eos_token_ids)
    beams, one_token = next(search)
    while True:
        requests = [prepare(beam, one_token) for beam in engine.reader.read(beams)]
        with engine.open(requests) as stream:
            if opened is not None:
                opened(stream)
            found = [answer.logprobs[0] for out in await stream.outputs() for answer in out.outputs if answer.logprobs]
        try:
            beams, one_token = search.send(found)
        except StopIteration as end:
            output: BeamSearchOutput = end.value[0]
            return output
