"""What the endpoints that run the model share: from a place in the queue to the stream of answers, and its end."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Protocol, TypeVar

from headrace.engine.answer_stream import AnswerStream
from headrace.engine.answers import Answers
from headrace.engine.checks import NOT_GENERATIVE
from headrace.engine.event_queue import EventQueue
from headrace.engine.prompts import TokenizedPrompt
from headrace.errors import RequestError
from headrace.monitor.times import RequestMeter
from headrace.openai.answer_format import NO_PARSERS, AnswerUse, read_answer_use
from headrace.openai.errors import MODEL_NOT_FOUND, bad_request, not_supported
from headrace.openai.sampling import Limits
from headrace.openai.schema.chat import ChatRequest
from headrace.openai.schema.common import StreamOptions
from headrace.server.endpoints.deadline import QUEUE_TIMEOUT, seconds_in
from headrace.server.http.errors import ApiError, ClientGoneError
from headrace.server.http.exchange import Deadline, Exchange, too_late
from headrace.server.request_queue import Overloaded
from headrace.server.services import Reservation, Services
from headrace.types import BACKGROUND_PRIORITY, Request, SamplingParams, SequenceEvent


def limits_of(services: Services) -> Limits:
    options = services.options
    return Limits(options.max_n, options.max_logprobs, services.engine.spec.vocab_size)


def names_tokens_by_id(services: Services, asked: bool | None) -> bool:
    """Whether log-probabilities name tokens by their ids: the client or the server's settings say so."""
    return services.options.return_tokens_as_token_ids if asked is None else asked


def includes_final_usage(options: StreamOptions | None, services: Services) -> bool:
    """Whether a stream ends with the usage: the client asks for it, or the server's settings say so."""
    return services.options.enable_force_include_usage or (options is not None and bool(options.include_usage))


def includes_running_usage(options: StreamOptions | None, services: Services) -> bool:
    """Whether each chunk has the usage so far. A server that is set to include it does so in each, as vLLM's."""
    return services.options.enable_force_include_usage or (
        options is not None and bool(options.include_usage and options.continuous_usage_stats)
    )


def check_model(services: Services, name: str | None, *, generates: bool = True) -> None:
    """Refuse the name of another model, and, for a request that `generates` text, a model that does not."""
    if generates and services.engine.spec.pooler is not None:
        raise RequestError(NOT_GENERATIVE, param="model", code="unsupported_model")
    if name is not None and name not in services.model_names and services.adapter_of(name) is None:
        known = " and ".join(map(repr, (*services.model_names, *services.engine.adapters)))
        raise ApiError(
            404,
            f"there is no model {name!r} here; this server has {known}",
            param="model",
            code=MODEL_NOT_FOUND,
        )


def answer_use_of(services: Services, request: ChatRequest) -> AnswerUse:
    """How the answer to a request is parsed; `request` is the form of it that a chat has."""
    tokenizer = services.engine.tokenizer
    if tokenizer is None:
        return NO_PARSERS  # the prompt is refused
    options = services.options
    return read_answer_use(request, tokenizer, options.parser_names, allows_auto=options.enable_auto_tool_choice)


def priority_of(services: Services, given: int | None) -> int:
    """Returns the priority. Refuses one if the policy is the order of arrival, which would ignore it."""
    if not given:
        return 0
    if services.engine.settings.queue_policy != "priority":
        raise not_supported("priority", "priority needs a server with --scheduling-policy priority; leave it out")
    if not -(2**31) <= given < BACKGROUND_PRIORITY:
        raise bad_request(f"priority must be between -2,147,483,648 and {BACKGROUND_PRIORITY - 1:,}", "priority")
    return given


def answer_id(prefix: str, given: str | None, exchange: Exchange) -> str:
    """The id of an answer: from the body's `request_id`, else from X-Request-Id, so that logs can be joined by it."""
    of_header = exchange.scope.get("headrace", {}).get("request_id")
    return f"{prefix}{given or of_header or uuid.uuid4().hex}"


def engine_id(id: str, given: str | None) -> str:
    """The id in the engine. A proxy may send an X-Request-Id again while the first request runs; a `request_id` of the
    body that is in use is refused."""
    return id if given else f"{id}-{uuid.uuid4().hex[:16]}"


def cache_salt(exchange: Exchange, given: str | None) -> str | None:
    """The client's salt below that of its key, so that no client can read another key's cached prefixes."""
    of_key = exchange.scope.get("headrace", {}).get("cache_salt")
    if of_key is None:
        return given
    return str(of_key) if given is None else f"{of_key}/{given}"


class Asked(Protocol):
    """The fields that the bodies of all these endpoints have."""

    @property
    def model(self) -> str | None: ...

    @property
    def stream(self) -> bool | None: ...

    @property
    def cache_salt(self) -> str | None: ...


def prepared(
    services: Services,
    exchange: Exchange,
    asked: Asked,
    prompt: TokenizedPrompt,
    params: SamplingParams,
    request_id: str,
    *,
    priority: int,
) -> Answers:
    """A request for the engine. One that is not streamed has two events: its first token and its end."""
    return services.engine.prepare(
        prompt,
        params,
        request_id,
        priority=priority,
        cache_salt=cache_salt(exchange, asked.cache_salt),
        watched=bool(asked.stream),
        announced=True,
        adapter=services.adapter_of(asked.model),
    )


class Running(Protocol):
    """A submitted request as it is measured: an answer or an embedding."""

    @property
    def request(self) -> Request: ...

    @property
    def error(self) -> str | None: ...

    @property
    def finish_reason(self) -> str | None: ...

    @property
    def lengths(self) -> Sequence[int]: ...


class Stream(Protocol):
    """A context manager that submits requests, and ends them when it is left."""

    @property
    def event_queue(self) -> EventQueue: ...

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


AnyStream = TypeVar("AnyStream", bound=Stream)


def running(
    services: Services, exchange: Exchange, requests: Sequence[Answers], reservation: Reservation, *, arrived: float
) -> AbstractAsyncContextManager[AnswerStream]:
    """Submits, watches and measures the requests. They have ended when this is left, however it is left."""
    open_stream = partial(services.engine.open, requests)
    return run_stream(services, exchange, requests, open_stream, reservation, arrived=arrived)


@asynccontextmanager
async def run_stream(
    services: Services,
    exchange: Exchange,
    requests: Sequence[Running],
    open_stream: Callable[..., AnyStream],  # called with on_timing
    reservation: Reservation,
    *,
    arrived: float,
) -> AsyncIterator[AnyStream]:
    """The same for any stream of these requests."""
    first = requests[0].request
    size = sum(each.request.params.num_sequences for each in requests)
    for each in requests:
        params, is_sampled = each.request.params, each.request.readout is None
        services.metrics.received(n=params.n, max_tokens=params.max_tokens if is_sampled else None)
    meters = [RequestMeter(services.metrics, each.request, arrived=arrived) for each in requests]
    is_waiting = True

    def on_timing(position: int, event: SequenceEvent) -> None:
        nonlocal is_waiting
        if is_waiting:
            is_waiting = False
            reservation.started()
        meters[position].take(event)

    stream = open_stream(on_timing=on_timing)
    deadline = deadline_of(services, exchange, arrived)
    reason = "error"
    try:
        with exchange.watched_by(stream.event_queue, deadline=deadline):
            async with _place_in_engine(services, exchange, size=size, priority=first.priority, deadline=deadline):
                with stream:
                    if services.engine.num_engines > 1:
                        for meter, each in zip(meters, requests, strict=True):
                            meter.engine = services.engine.engine_of(each.request.request_id)
                    yield stream
    except (ClientGoneError, ApiError, Overloaded, asyncio.CancelledError):
        reason = "abort"
        raise
    finally:
        for meter, each in zip(meters, requests, strict=True):
            ended = "error" if each.error is not None else each.finish_reason or reason
            times = meter.finish(ended, each.lengths)
            if services.traces is not None and times is not None:
                services.traces.finished(exchange.scope, each.request, times, ended)
        if services.options.enable_log_requests:
            note_tokens(exchange, requests)


def note_tokens(exchange: Exchange, requests: Sequence[Running]) -> None:
    """Count the tokens of a request for its line in the log."""
    exchange.scope.get("headrace", {}).update(
        num_prompt_tokens=sum(len(each.request.prompt_token_ids) for each in requests),
        num_output_tokens=sum(sum(each.lengths) for each in requests),
    )


@asynccontextmanager
async def _place_in_engine(
    services: Services, exchange: Exchange, *, size: int, priority: int, deadline: Deadline | None
) -> AsyncIterator[None]:
    """Hold a place in the engine under dynamic batching. Waiting for one ends at the request's deadline."""
    if services.dispatcher is None:
        yield
        return
    timeout_s = seconds_in(exchange.scope["headers"], QUEUE_TIMEOUT)
    async with AsyncExitStack() as place:
        try:
            async with asyncio.timeout(None if deadline is None else deadline.left_s):
                await place.enter_async_context(
                    services.dispatcher.enter(size=size, priority=priority, timeout_s=timeout_s)
                )
        except TimeoutError:
            assert deadline is not None
            raise too_late(deadline) from None
        yield


def deadline_of(services: Services, exchange: Exchange, arrived: float) -> Deadline | None:
    limit = services.options.request_timeout_s
    if services.deadline_s is not None:
        limit = services.deadline_s(exchange.scope)
    return None if limit is None else Deadline(limit, max(0.0, limit - (monotonic() - arrived)))
