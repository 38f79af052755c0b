"""Beam search for the endpoints. It is never streamed, and uses one engine stream for each step of the search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headrace.engine.answer_stream import AnswerStream
from headrace.engine.beam_search import BeamSearchOutput, BeamSearchParams
from headrace.engine.event_queue import EventQueue
from headrace.engine.prompts import TokenizedPrompt
from headrace.errors import RequestError
from headrace.monitor.times import RequestMeter
from headrace.openai.errors import UNSUPPORTED, bad_request
from headrace.openai.sampling import AnswerLimit
from headrace.openai.schema.common import SamplingFields
from headrace.server.endpoints.generation import cache_salt, deadline_of
from headrace.server.http.exchange import Exchange
from headrace.server.services import Reservation, Services
from headrace.types import CompletionOutput, Request, SamplingParams

_NOT_WITH_BEAMS = (
    *("best_of", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words", "bad_words_token_ids", "seed", "stop", "stop_token_ids"),
    *("min_tokens", "echo", "prompt_logprobs", "response_format", "structured_outputs", "tools"),
)


def beam_params(request: SamplingFields, limit: AnswerLimit, max_model_len: int) -> BeamSearchParams:
    for name in _NOT_WITH_BEAMS:
        if getattr(request, name, None) not in (None, False, 0, [], ""):
            raise bad_request(f"{name} cannot be used with use_beam_search", name, UNSUPPORTED)
    if request.stream:
        raise bad_request("a beam search cannot be streamed: the beams are known at the end", "stream")
    try:
        return BeamSearchParams(
            beam_width=1 if request.n is None else request.n,
            max_tokens=max_model_len if limit.num_tokens is None else limit.num_tokens,
            ignore_eos=bool(request.ignore_eos),
            temperature=0.0 if request.temperature is None else request.temperature,
            length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        )
    except RequestError as error:
        names = {"beam_width": "n", "max_tokens": limit.param}
        param = names.get(error.param or "", error.param)
        raise bad_request(str(error).replace("beam_width", "n (the beam width)", 1), param) from None


class Relay(EventQueue):
    """Passes an end on to the engine stream that is running."""

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
    """The answers, best first."""
    counted = Request("", prompt.token_ids, SamplingParams(n=params.beam_width, max_tokens=params.max_tokens))
    services.metrics.received(n=params.beam_width, max_tokens=params.max_tokens)
    meter = RequestMeter(services.metrics, counted, arrived=arrived)
    relay = Relay()
    reason, num_generated = "abort", 0
    try:
        with exchange.watched_by(relay, deadline=deadline_of(services, exchange, arrived)):
            reservation.started()
            found = await services.engine.beam_search(
                prompt,
                params,
                priority=request.priority or 0,
                cache_salt=cache_salt(exchange, request.cache_salt),
                opened=relay.opened,
                adapter=services.adapter_of(request.model),
            )
        answers = list(_answers(found, prompt, services, request))
        reason = answers[0].finish_reason or "stop"
        num_generated = sum(len(answer.token_ids) for answer in answers)
        return answers
    finally:
        times = meter.finish(reason)
        if services.traces is not None and times is not None:
            services.traces.finished(exchange.scope, counted, replace(times, num_generated=num_generated), reason)


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
