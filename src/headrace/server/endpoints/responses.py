"""POST /v1/responses: OpenAI's Responses API, without stored state."""

from __future__ import annotations

import uuid
from time import monotonic, time
from typing import Any

import msgspec

from headrace.engine.answer_stream import AnswerStream
from headrace.engine.answers import AnswerDelta
from headrace.openai.body import read
from headrace.openai.response_items import as_messages
from headrace.openai.responses import (
    ITEM_ID_PREFIX,
    RESPONSE_ID_PREFIX,
    ResponseFields,
    ResponseWriter,
    responses_limit,
    responses_params,
    status_of,
)
from headrace.openai.sampling import check_context
from headrace.openai.schema.responses import STATEFUL, ResponsesRequest
from headrace.openai.usage import Usage
from headrace.server.endpoints.generation import (
    answer_id,
    check_model,
    engine_id,
    limits_of,
    prepared,
    priority_of,
    running,
)
from headrace.server.endpoints.prompting import estimated_tokens, tokenize_chat
from headrace.server.http.chunks import encode
from headrace.server.http.errors import ApiError
from headrace.server.http.exchange import Exchange
from headrace.server.http.sse import EventStream
from headrace.server.services import Services
from headrace.types import CompletionOutput


async def create_response(services: Services, exchange: Exchange) -> None:
    arrived = monotonic()
    body = await exchange.read_body(services.options.max_body_bytes)
    request = read(ResponsesRequest, body, unsupported=STATEFUL)
    check_model(services, request.model)
    priority = priority_of(services, request.priority)
    limit = responses_limit(request)
    params = responses_params(request, limits_of(services), limit)
    messages = as_messages(request)
    max_model_len = services.engine.settings.max_model_len
    with services.queue.reserve(1, num_tokens=estimated_tokens([messages], max_model_len)) as reservation:
        params = await services.engine.compiled(params)
        prompt = await tokenize_chat(
            services.engine.reader,
            messages,
            num_characters=len(body),
            limited_param="input",
            variables=request.chat_template_kwargs,
        )
        check_context(len(prompt.token_ids), limit, max_model_len, prompt_param="input")
        reservation.count_tokens(len(prompt.token_ids))
        id = answer_id(RESPONSE_ID_PREFIX, request.request_id, exchange)
        reply = ResponseReply(ResponseFields.of(request, params), services, id)
        answers = prepared(
            services, exchange, request, prompt, params, engine_id(reply.id, request.request_id), priority=priority
        )
        async with running(services, exchange, [answers], reservation, arrived=arrived) as stream:
            await (reply.stream(exchange, stream) if request.stream else reply.whole(exchange, stream))


class ResponseReply(ResponseWriter):
    """Sends the answer to one request, whole or as events."""

    def __init__(self, fields: ResponseFields, services: Services, id: str) -> None:
        super().__init__(
            fields,
            services.engine.tokenizer,
            id=id,
            item_id=f"{ITEM_ID_PREFIX}{uuid.uuid4().hex}",
            model_name=services.model_name,
            created_at=int(time()),
        )
        self._services = services

    def ended(self, answer: CompletionOutput, usage: Usage) -> dict[str, Any]:
        return self.finished(answer.text, answer.logprobs, answer.finish_reason, usage)

    async def whole(self, exchange: Exchange, stream: AnswerStream) -> None:
        (output,) = await stream.outputs()
        body = self.ended(output.outputs[0], Usage.of([output]))
        await exchange.reply(200, msgspec.json.encode(body))

    async def stream(self, exchange: Exchange, stream: AnswerStream) -> None:
        writer = ResponseEvents(self)
        with EventStream(exchange, stream.event_queue, self._services.options.sse_keep_alive_interval_s) as events:

            async def fail(error: ApiError) -> None:
                await events.end(writer.failed(error), done=b"")

            exchange.fail_stream = fail
            await events.follow(stream, writer.delta)
            output = stream.requests[0].output()
            await events.end(writer.end(output.outputs[0], Usage.of([output])), done=b"")


class ResponseEvents:
    """Writes the events of one stream and numbers them."""

    def __init__(self, reply: ResponseReply) -> None:
        self._reply = reply
        self._number = 0
        self._is_begun = False
        self._place = {"item_id": reply.item_id, "output_index": 0, "content_index": 0}
        self._delta_head = _event_head("response.output_text.delta") + encode(self._place)[1:-1] + b',"delta":'

    def delta(self, delta: AnswerDelta) -> bytes:
        begin = b"" if self._is_begun else self._begin()
        if not (delta.text or delta.logprobs):
            return begin
        logprobs = encode(self._reply.logprobs(delta.logprobs)) if delta.logprobs else b"[]"
        tail = b',"logprobs":%b,"sequence_number":%d}\n\n' % (logprobs, self._next())
        return begin + self._delta_head + encode(delta.text) + tail

    def _begin(self) -> bytes:
        self._is_begun = True
        reply = self._reply
        started = reply.response("in_progress", [])
        return b"".join(
            (
                self._event("response.created", {"response": started}),
                self._event("response.in_progress", {"response": started}),
                self._event(
                    "response.output_item.added", {"output_index": 0, "item": reply.message("in_progress", [])}
                ),
                self._event("response.content_part.added", {**self._place, "part": reply.part("", None)}),
            )
        )

    def end(self, answer: CompletionOutput, usage: Usage) -> bytes:
        begin = b"" if self._is_begun else self._begin()
        reply, status = self._reply, status_of(answer.finish_reason)
        part = reply.part(answer.text, answer.logprobs)
        done = {**self._place, "text": answer.text, "logprobs": part["logprobs"]}
        item = reply.message(status, [part])
        return begin + b"".join(
            (
                self._event("response.output_text.done", done),
                self._event("response.content_part.done", {**self._place, "part": part}),
                self._event("response.output_item.done", {"output_index": 0, "item": item}),
                self._event(f"response.{status}", {"response": reply.ended(answer, usage)}),
            )
        )

    def failed(self, error: ApiError) -> bytes:
        begin = b"" if self._is_begun else self._begin()
        response = self._reply.response("failed", [], error=error.message)
        return begin + self._event("response.failed", {"response": response})

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        return _event_head(name) + encode({**fields, "sequence_number": self._next()})[1:] + b"\n\n"

    def _next(self) -> int:
        self._number += 1
        return self._number - 1


def _event_head(name: str) -> bytes:
    return b'event: %b\ndata: {"type":"%b",' % (name.encode(), name.encode())
