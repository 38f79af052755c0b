"""Beam search for the endpoints: never streamed, a stream of the engine for each turn."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.engine.answer_stream import AnswerStream
from headrace.engine.beam_search import BeamSearchOutput, BeamSearchParams
from headrace.engine.event_queue import EventQueue
from headrace.engine.prompts import TokenizedPrompt
from headrace.monitor.times import RequestMeter
from headrace.server.endpoints.generation import cache_salt, deadline
from headrace.server.endpoints.schema.common import SamplingFields
from headrace.server.http.exchange import Exchange
from headrace.server.services import Reservation, Services
from headrace.types import CompletionOutput, Request, SamplingParams


class Relay(EventQueue):
    """Passes an end on to the stream of the turn that is running."""

    __slots__ = ("_current",)

    def __init__(self) -> None:
        super().__init__()
        self._current: AnswerStream | None = None

    def opened(self, stream: AnswerStream) -> None:
        self._current = stream
        if self._ending is not None:
            stream.event_queue.end(self._ending)

    def end(self, error: Exception) -> None:
        super().end(error)
        if self._current is not None:
            self._current.event_queue.end(error)


async def search_beams(
    services: Services,
    exchange: Exchange,
    prompt: TokenizedPrompt,
    request: SamplingFields,
    params: BeamSearchParams,
    reservation: Reservation,
    *,
    arrived: float,
) -> list[CompletionOutput]:
    """The best answers, the best first."""
    counted = Request("", prompt.token_ids, SamplingParams(n=params.beam_width, max_tokens=params.max_tokens))
    services.metrics.received(n=params.beam_width, max_tokens=params.max_tokens)
    meter = RequestMeter(services.metrics, counted, arrived=arrived)
    relay = Relay()
    reason = "abort"
    try:
        with exchange.watched_by(relay, deadline_s=deadline(services, exchange, arrived)):
            reservation.started()
            found = await services.engine.beam_search(
                prompt,
                params,
                priority=request.priority or 0,
                cache_salt=cache_salt(exchange, request.cache_salt),
                opened=relay.opened,
            )
        answers = list(_answers(found, prompt, services, request))
        reason = answers[0].finish_reason or "stop"
        return answers
    finally:
        meter.finish(reason)


def _answers(
    found: BeamSearchOutput, prompt: TokenizedPrompt, services: Services, request: SamplingFields
) -> Iterator[CompletionOutput]:
    tokenizer = services.engine.tokenizer
    for index, beam in enumerate(found.sequences):
        tokens = beam.tokens[len(prompt.token_ids) :]
        is_ended = beam.finish_reason == "stop"
        shown = tokens[:-1] if is_ended and not request.include_stop_str_in_output else tokens
        text = "" if tokenizer is None else tokenizer.decode(shown, request.skip_special_tokens is not False)
        yield CompletionOutput(index, text, tokens, beam.finish_reason, logprobs=beam.logprobs)
