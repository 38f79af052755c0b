"""POST /v1/responses: OpenAI's Responses API, without stored state."""

from __future__ import annotations

import uuid
from time import monotonic, time
from typing import Any

import msgspec

from headrace.engine.answer_stream import AnswerStream
from headrace.engine.answers import AnswerDelta
from headrace.openai.body import read
from headrace.openai.errors import INVALID_TYPE, UNKNOWN, bad_request, not_supported
from headrace.openai.fields import note_ignored
from headrace.openai.logprobs import chat_entries
from headrace.openai.sampling import (
    AnswerLimit,
    Limits,
    check_context,
    check_label,
    check_logprobs,
    sampling_params,
)
from headrace.openai.schema.common import SamplingFields
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
from headrace.server.endpoints.response_items import as_messages
from headrace.server.http.chunks import encode
from headrace.server.http.errors import ApiError
from headrace.server.http.exchange import Exchange
from headrace.server.http.sse import EventStream
from headrace.server.services import Services
from headrace.types import CompletionOutput, SamplingParams

LOGPROBS = "message.output_text.logprobs"
_COPIED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "ignore_eos", "priority", "cache_salt", "request_id", "stream"),
)


async def create_response(services: Services, exchange: Exchange) -> None:
    arrived = monotonic()
    body = await exchange.read_body(services.options.max_body_bytes)
    request = read(ResponsesRequest, body, unsupported=STATEFUL)
    check_model(services, request.model)
    priority = priority_of(services, request.priority)
    limit = AnswerLimit(request.max_output_tokens, "max_output_tokens")
    params = _params(request, limits_of(services), limit)
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
        reply = ResponseReply(request, services, params, answer_id("resp_", request.request_id, exchange))
        answers = prepared(
            services, exchange, request, prompt, params, engine_id(reply.id, request.request_id), priority=priority
        )
        async with running(services, exchange, [answers], reservation, arrived=arrived) as stream:
            await (reply.stream(exchange, stream) if request.stream else reply.whole(exchange, stream))


def _params(request: ResponsesRequest, limits: Limits, limit: AnswerLimit) -> SamplingParams:
    _check(request, limits)
    if limit.num_tokens is not None and limit.num_tokens < 1:
        raise bad_request(f"max_output_tokens must be at least 1, got {limit.num_tokens}", "max_output_tokens")
    fields = SamplingFields(
        **{name: getattr(request, name) for name in _COPIED}, response_format=_response_format(request.text)
    )
    wants_logprobs = request.top_logprobs is not None or LOGPROBS in (request.include or ())
    return sampling_params(
        fields,
        limits,
        limit,
        logprobs=(request.top_logprobs or 0) if wants_logprobs else None,
    )


def _check(request: ResponsesRequest, limits: Limits) -> None:
    for name in request.include or ():
        if name != LOGPROBS:
            raise not_supported("include", f"include cannot have {name!r}, only {LOGPROBS!r}")
    if request.truncation not in (None, "disabled"):
        raise not_supported("truncation", "truncation must be 'disabled': shorten the input instead")
    if request.tools or request.tool_choice not in (None, "none", "auto"):
        raise not_supported("tools", "tools are not supported here; use /v1/chat/completions")
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options is for streams: set stream to true", "stream_options")
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise not_supported("stream_options.include_obfuscation", "include_obfuscation is not supported; leave it out")
    check_label("request_id", request.request_id)
    check_logprobs("top_logprobs", request.top_logprobs, limits)


def _response_format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    """`text.format` in the form of `response_format`."""
    for name in text or {}:
        if name not in ("format", "verbosity"):
            raise bad_request(f"unknown parameter 'text.{name}'", f"text.{name}", UNKNOWN)
    if text is None:
        return None
    if text.get("verbosity") is not None:
        note_ignored("text.verbosity")
    given = text.get("format")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise bad_request("text.format must be an object", "text.format", INVALID_TYPE)
    if given.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: given[name] for name in given if name != "type"}}
    return given


class ResponseReply:
    """Writes the answer to one request, whole or as events."""

    def __init__(self, request: ResponsesRequest, services: Services, params: SamplingParams, id: str) -> None:
        self.id = id
        self.item_id = f"msg_{uuid.uuid4().hex}"
        self._request = request
        self._services = services
        self._params = params
        self._created_at = int(time())

    def response(
        self, status: str, output: list[dict[str, Any]], usage: Usage | None = None, *, error: ApiError | None = None
    ) -> dict[str, Any]:
        request = self._request
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "background": False,
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._services.model_name,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self._params.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": self._params.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": request.user,
        }

    def message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def part(self, text: str, logprobs: Any) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs(logprobs)}

    def logprobs(self, entries: Any) -> list[dict[str, Any]]:
        return [] if entries is None else chat_entries(entries, self._services.engine.tokenizer)

    def finished(self, answer: CompletionOutput, usage: Usage) -> dict[str, Any]:
        status = _status(answer)
        return self.response(status, [self.message(status, [self.part(answer.text, answer.logprobs)])], usage)

    async def whole(self, exchange: Exchange, stream: AnswerStream) -> None:
        (output,) = await stream.outputs()
        body = self.finished(output.outputs[0], Usage.of([output]))
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
        reply, status = self._reply, _status(answer)
        part = reply.part(answer.text, answer.logprobs)
        done = {**self._place, "text": answer.text, "logprobs": part["logprobs"]}
        item = reply.message(status, [part])
        return begin + b"".join(
            (
                self._event("response.output_text.done", done),
                self._event("response.content_part.done", {**self._place, "part": part}),
                self._event("response.output_item.done", {"output_index": 0, "item": item}),
                self._event(f"response.{status}", {"response": reply.finished(answer, usage)}),
            )
        )

    def failed(self, error: ApiError) -> bytes:
        begin = b"" if self._is_begun else self._begin()
        response = self._reply.response("failed", [], error=error)
        return begin + self._event("response.failed", {"response": response})

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        return _event_head(name) + encode({**fields, "sequence_number": self._next()})[1:] + b"\n\n"

    def _next(self) -> int:
        self._number += 1
        return self._number - 1


def _event_head(name: str) -> bytes:
    return b'event: %b\ndata: {"type":"%b",' % (name.encode(), name.encode())


def _status(answer: CompletionOutput) -> str:
    return "completed" if answer.finish_reason == "stop" else "incomplete"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
        "output_tokens": usage.num_generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.num_prompt + usage.num_generated,
    }
