"""POST /v1/responses: OpenAI's Responses API. What is stored is read by `stored_responses`."""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic, time
from typing import Any

import msgspec

from headrace.engine.answer_stream import AnswerStream
from headrace.engine.answers import Answers
from headrace.engine.prompts import TokenizedPrompt
from headrace.errors import RequestError
from headrace.openai.answer_format import AnswerFormat, AnswerUse
from headrace.openai.body import read
from headrace.openai.errors import bad_request
from headrace.openai.response_items import Item, as_messages, input_items
from headrace.openai.responses import (
    RESPONSE_ID_PREFIX,
    RawMessage,
    ResponseFields,
    ResponseWriter,
    response_tools,
    response_variables,
    responses_limit,
    responses_params,
)
from headrace.openai.sampling import AnswerLimit, check_context
from headrace.openai.schema.responses import UNSUPPORTED_IN_RESPONSES, ResponsesRequest
from headrace.openai.usage import Usage
from headrace.sched.limits import CONTEXT_EXCEEDED
from headrace.server.endpoints.background import BackgroundRun
from headrace.server.endpoints.files import owner_of
from headrace.server.endpoints.generation import (
    answer_id,
    answer_use_of,
    check_model,
    engine_id,
    limits_of,
    prepared,
    priority_of,
    running,
)
from headrace.server.endpoints.prompting import estimated_tokens, tokenize_chat
from headrace.server.endpoints.response_events import ResponseEvents
from headrace.server.http.errors import ApiError
from headrace.server.http.exchange import Exchange
from headrace.server.http.sse import EventStream
from headrace.server.response_store import UNFINISHED, StoredResponse
from headrace.server.services import Reservation, Services
from headrace.types import SamplingParams


async def create_response(services: Services, exchange: Exchange) -> None:
    arrived = monotonic()
    body = await exchange.read_body(services.options.max_body_bytes)
    request = read(ResponsesRequest, body, unsupported=UNSUPPORTED_IN_RESPONSES)
    check_model(services, request.model)
    priority = priority_of(services, request.priority)
    asked = AskedResponse.of(services, request, owner=owner_of(exchange), num_bytes=len(body))
    max_model_len = services.engine.settings.max_model_len
    num_tokens = estimated_tokens([[asked.messages, asked.use.tool_use.tools]], max_model_len)
    with ExitStack() as held:
        reservation = held.enter_context(services.queue.reserve(1, num_tokens=num_tokens))
        params = await services.engine.compiled(asked.params)
        prompt = await asked.tokenized(services)
        reservation.count_tokens(len(prompt.token_ids))
        is_inside = asked.use.is_inside(prompt.text)
        params = asked.use.constrained(params, is_inside, services.engine.get_tokenizer())
        format, id = asked.use.format(is_inside), _new_id(services, exchange, asked)
        reply = ResponseReply(services, asked, format, id, prompt=_shown(request, prompt))
        id = engine_id(reply.writer.id, request.request_id)
        answers = prepared(services, exchange, request, prompt, params, id, priority=priority)
        if request.background:
            await reply.in_background(exchange, answers, reservation, held.pop_all(), arrived=arrived)
            return
        async with running(services, exchange, [answers], reservation, arrived=arrived) as stream:
            await (reply.stream(exchange, stream) if request.stream else reply.whole(exchange, stream))


@dataclass(frozen=True, slots=True)
class AskedResponse:
    """A request that was read and checked, with the conversation that it continues."""

    request: ResponsesRequest
    owner: str
    use: AnswerUse
    limit: AnswerLimit
    params: SamplingParams
    items: list[Item]  # of the whole conversation
    messages: list[dict[str, Any]]
    is_stored: bool
    num_bytes: int  # of the conversation, as JSON

    @classmethod
    def of(cls, services: Services, request: ResponsesRequest, *, owner: str, num_bytes: int) -> AskedResponse:
        store = services.responses
        use = answer_use_of(services, response_tools(request))
        limit = responses_limit(request)
        params = responses_params(request, limits_of(services), limit, **use.params)
        if request.background and not store.is_on:
            raise bad_request("this server stores no responses (--max-stored-responses 0)", "background")
        previous = _previous(services, request, owner)
        items = input_items(request, lambda id: store.find_item(owner, id))
        if previous is not None:
            items = [*previous.conversation, *items]
            num_bytes += previous.num_bytes
        is_text = previous is None and isinstance(request.input, str)
        messages = as_messages(request, None if is_text else items)
        is_stored = store.is_on and request.store is not False
        return cls(request, owner, use, limit, params, items, messages, is_stored, num_bytes)

    async def tokenized(self, services: Services) -> TokenizedPrompt:
        try:
            return await self._tokenized(services, self.messages)
        except RequestError as error:
            if self.request.truncation != "auto" or error.code != CONTEXT_EXCEEDED:
                raise
        return await self._truncated(services)

    async def _truncated(self, services: Services) -> TokenizedPrompt:
        """The prompt without as many of the first turns as do not fit. Each turn starts with a message of the user."""
        rules = [message for message in self.messages if message["role"] == "system"]
        others = [message for message in self.messages if message["role"] != "system"]
        starts = [place for place, message in enumerate(others) if message["role"] == "user"][1:]
        if not starts:
            return await self._tokenized(services, self.messages)  # which raises
        low, high = 0, len(starts) - 1  # the first start that fits is searched for
        while low < high:
            middle = (low + high) // 2
            try:
                await self._tokenized(services, [*rules, *others[starts[middle] :]])
                high = middle
            except RequestError as error:
                if error.code != CONTEXT_EXCEEDED:
                    raise
                low = middle + 1
        return await self._tokenized(services, [*rules, *others[starts[low] :]])

    async def _tokenized(self, services: Services, messages: list[dict[str, Any]]) -> TokenizedPrompt:
        prompt = await tokenize_chat(
            services.engine.reader,
            messages,
            num_characters=self.num_bytes,
            limited_param="input",
            tools=self.use.tool_use.tools,
            variables=response_variables(self.request),
        )
        max_model_len = services.engine.settings.max_model_len
        check_context(len(prompt.token_ids), self.limit, max_model_len, prompt_param="input")
        return prompt


def _shown(request: ResponsesRequest, prompt: TokenizedPrompt) -> RawMessage | None:
    return RawMessage(prompt.text or "", prompt.token_ids.tolist()) if request.enable_response_messages else None


def _previous(services: Services, request: ResponsesRequest, owner: str) -> StoredResponse | None:
    id = request.previous_response_id
    if id is None:
        return None
    found = services.responses.find(owner, id)
    if found is None:
        raise bad_request(
            f"there is no stored response {id[:80]!r}; it was not stored, was dropped for newer ones, or belongs to "
            "another key. Send the whole conversation as input",
            "previous_response_id",
            "previous_response_not_found",
        )
    if found.status in UNFINISHED:
        raise bad_request(f"the response {id[:80]!r} is {found.status}; wait for its end", "previous_response_id")
    return found


def _new_id(services: Services, exchange: Exchange, asked: AskedResponse) -> str:
    """A proxy may send the same X-Request-Id for several requests: a response that is stored is not replaced."""
    given = asked.request.request_id
    id = answer_id(RESPONSE_ID_PREFIX, given, exchange)
    if not asked.is_stored or services.responses.find(asked.owner, id) is None:
        return id
    if given is not None:
        raise bad_request(f"there is a stored response {id!r} already; choose another request_id", "request_id")
    return f"{id}-{uuid.uuid4().hex[:16]}"


class ResponseReply:
    """Sends the answer to one request, whole, as events or in the background, and stores it."""

    def __init__(
        self,
        services: Services,
        asked: AskedResponse,
        format: AnswerFormat | None,
        id: str,
        *,
        prompt: RawMessage | None = None,
    ) -> None:
        self._services = services
        self._asked = asked
        self.writer = ResponseWriter(
            ResponseFields.of(asked.request, asked.params, format=format, is_stored=asked.is_stored),
            services.engine.tokenizer,
            id=id,
            make_id=lambda prefix: f"{prefix}{uuid.uuid4().hex}",
            model_name=services.answering(asked.request.model),
            created_at=int(time()),
            prompt=prompt,
        )

    async def whole(self, exchange: Exchange, stream: AnswerStream) -> None:
        (output,) = await stream.outputs()
        answer = output.outputs[0]
        response = self.writer.finished(answer.text, answer.logprobs, answer.finish_reason, Usage.of([output]))
        response |= self.writer.raw_messages(answer.text, answer.token_ids)
        body = msgspec.json.encode(response)
        self._store(response, len(body))
        await exchange.reply(200, body)

    async def stream(self, exchange: Exchange, stream: AnswerStream) -> None:
        writer = ResponseEvents(self.writer)
        with EventStream(exchange, stream.event_queue, self._services.options.sse_keep_alive_interval_s) as events:

            async def fail(error: ApiError) -> None:
                await events.end(writer.failed(error)[0], done=b"")

            exchange.fail_stream = fail
            await events.follow(stream, writer.delta)
            output = stream.requests[0].output()
            last, response = writer.end(output.outputs[0], Usage.of([output]))
            self._store(response, len(last))
            await events.end(last, done=b"")

    async def in_background(
        self, exchange: Exchange, answers: Answers, reservation: Reservation, held: ExitStack, *, arrived: float
    ) -> None:
        """`held` holds the place in the queue, which the run takes over."""
        stored = self._store(self.writer.response("queued", []), 0)
        run = BackgroundRun(self._services, self.writer, stored, answers, held)
        stored.run = run
        run.start(exchange, reservation=reservation, arrived=arrived)
        if self._asked.request.stream:
            await run.follow(exchange)
        else:
            await exchange.reply(200, msgspec.json.encode(stored.response))

    def _store(self, response: dict[str, Any], num_bytes: int) -> StoredResponse:
        asked = self._asked
        stored = StoredResponse(asked.owner, response, asked.items, asked.num_bytes + num_bytes)
        if asked.is_stored:
            self._services.responses.add(stored)
        return stored
