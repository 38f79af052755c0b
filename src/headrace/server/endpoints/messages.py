"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

from dataclasses import replace
from time import monotonic

import msgspec

from headrace.anthropic.answers import ID_PREFIX, MessageWriter, error_event
from headrace.anthropic.conversation import continued_text, is_prefill
from headrace.anthropic.errors import error_object
from headrace.anthropic.requests import (
    VERSION_HEADER,
    as_chat,
    check_version,
    read_count_request,
    read_request,
    template_settings,
)
from headrace.anthropic.schema import CountTokensRequest
from headrace.engine.answer_stream import AnswerStream
from headrace.engine.answers import AnswerDelta, Answers
from headrace.engine.prompts import TokenizedPrompt
from headrace.openai.answer_format import AnswerUse
from headrace.openai.sampling import AnswerLimit, chat_limit, chat_params, check_context
from headrace.openai.schema.chat import ChatRequest
from headrace.openai.usage import Usage
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
from headrace.server.http.errors import ApiError
from headrace.server.http.exchange import Exchange
from headrace.server.http.sse import EventStream
from headrace.server.services import Services

_TO_THE_END = AnswerLimit(None, is_given=False)


async def create_message(services: Services, exchange: Exchange) -> None:
    arrived = monotonic()
    check_version(exchange.header(VERSION_HEADER))
    body = await exchange.read_body(services.options.max_body_bytes)
    request = read_request(body)
    check_model(services, request.model)
    priority = priority_of(services, request.priority)
    chat = as_chat(request)
    use = answer_use_of(services, chat)
    params = chat_params(chat, limits_of(services), chat_limit(chat), **use.params)
    max_model_len = services.engine.settings.max_model_len
    num_tokens = estimated_tokens([[chat.messages, use.tool_use.tools]], max_model_len)
    with services.queue.reserve(1, num_tokens=num_tokens) as reservation:
        params = await services.engine.compiled(params)
        prompt = await _tokenized(services, request, chat, use, num_characters=len(body))
        check_context(len(prompt.token_ids), _TO_THE_END, max_model_len, prompt_param="messages")
        reservation.count_tokens(len(prompt.token_ids))
        num_left = max_model_len - len(prompt.token_ids)
        fills_context = request.max_tokens > num_left  # agents ask for more than a small context holds
        if fills_context:
            params = replace(params, max_tokens=num_left)
        id = answer_id(ID_PREFIX, request.request_id, exchange)
        is_inside = use.is_inside(prompt.text, continued_text(chat.messages))
        params = use.constrained(params, is_inside, services.engine.get_tokenizer())
        writer = MessageWriter(
            use.format(is_inside), id=id, model_name=services.answering(request.model), fills_context=fills_context
        )
        answers = prepared(
            services, exchange, request, prompt, params, engine_id(id, request.request_id), priority=priority
        )
        async with running(services, exchange, [answers], reservation, arrived=arrived) as stream:
            if request.stream:
                await _send_events(services, exchange, stream, writer)
            else:
                await _send_whole(exchange, stream, writer)


async def count_tokens(services: Services, exchange: Exchange) -> None:
    check_version(exchange.header(VERSION_HEADER))
    body = await exchange.read_body(services.options.max_body_bytes)
    request = read_count_request(body)
    check_model(services, request.model)
    chat = as_chat(request)
    prompt = await _tokenized(services, request, chat, answer_use_of(services, chat), num_characters=len(body))
    await exchange.reply(200, msgspec.json.encode({"input_tokens": len(prompt.token_ids)}))


async def _tokenized(
    services: Services, request: CountTokensRequest, chat: ChatRequest, use: AnswerUse, *, num_characters: int
) -> TokenizedPrompt:
    return await tokenize_chat(
        services.engine.reader,
        chat.messages,
        num_characters=num_characters,
        limited_param="messages",
        tools=use.tool_use.tools,
        continue_final_message=is_prefill(chat.messages),
        variables=template_settings(request),
    )


async def _send_whole(exchange: Exchange, stream: AnswerStream, writer: MessageWriter) -> None:
    (output,) = await stream.outputs()
    answer = output.outputs[0]
    message = writer.whole(answer.text, answer.finish_reason, answer.stop_reason, Usage.of([output]))
    await exchange.reply(200, msgspec.json.encode(message))


async def _send_events(services: Services, exchange: Exchange, stream: AnswerStream, writer: MessageWriter) -> None:
    (answers,) = stream.requests

    def write(delta: AnswerDelta) -> bytes:
        begin = b"" if writer.is_begun else writer.begin(_usage(answers, num_generated=0))
        return begin + writer.delta(delta.text, is_end=delta.finish_reason is not None)

    async def fail(error: ApiError) -> None:
        await events.end(error_event(error_object(error.message, error.status)), done=b"")

    with EventStream(exchange, stream.event_queue, services.options.sse_keep_alive_interval_s) as events:
        exchange.fail_stream = fail
        await events.follow(stream, write)
        answer = answers.output().outputs[0]
        usage = _usage(answers, num_generated=len(answer.token_ids))
        await events.end(writer.end(answer.finish_reason, answer.stop_reason, usage), done=b"")


def _usage(answers: Answers, *, num_generated: int) -> Usage:
    return Usage(len(answers.request.prompt_token_ids), num_generated, answers.num_cached_tokens)
