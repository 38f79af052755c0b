"""POST /v1/chat/completions: the assistant's next message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from time import monotonic, time
from typing import Any

from headrace.engine.answer_stream import AnswerStream
from headrace.engine.answers import AnswerDelta, Answers
from headrace.engine.prompts import TokenizedPrompt
from headrace.openai.body import read
from headrace.openai.choices import CHAT_ID_PREFIX, CHAT_OBJECT, chat_choice, completion_body, encode, members
from headrace.openai.logprobs import chat_logprobs, prompt_entries
from headrace.openai.prompts import template_variables
from headrace.openai.sampling import AnswerLimit, chat_limit, chat_params, check_context
from headrace.openai.schema.chat import ChatRequest
from headrace.openai.tool_use import ToolCalls, ToolUse, delta_object
from headrace.openai.usage import Usage
from headrace.server.endpoints.beams import beam_params, search_beams
from headrace.server.endpoints.completions import truncated
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
from headrace.server.endpoints.prompting import estimated_tokens, off_loop, tokenize_chat
from headrace.server.http.chunks import Chunks
from headrace.server.http.exchange import Exchange
from headrace.server.http.sse import EventStream
from headrace.server.services import Reservation, Services
from headrace.text import Tokenizer
from headrace.text.tool_calls import ContentDelta
from headrace.types import CompletionOutput, RequestOutput


async def create_chat_completion(services: Services, exchange: Exchange) -> None:
    arrived = monotonic()
    body = await exchange.read_body(services.options.max_body_bytes)
    request = read(ChatRequest, body)
    check_model(services, request.model)
    priority = priority_of(services, request.priority)
    use = answer_use_of(services, request).tool_use
    limit = chat_limit(request)
    params = chat_params(request, limits_of(services), limit, **use.params)
    max_model_len = services.engine.settings.max_model_len
    num_tokens = estimated_tokens([[request.messages, use.tools]], max_model_len)
    with services.queue.reserve(1, num_tokens=num_tokens) as reservation:
        params = await services.engine.compiled(params)
        prompt = await _tokenize(request, services, use, num_characters=len(body))
        prompt = truncated(prompt, request.truncate_prompt_tokens, limit, max_model_len)
        check_context(len(prompt.token_ids), limit, max_model_len, prompt_param="messages")
        reservation.count_tokens(len(prompt.token_ids))
        reply = ChatReply(request, services, use, answer_id(CHAT_ID_PREFIX, request.request_id, exchange))
        if request.use_beam_search:
            await reply.search_beams(exchange, prompt, reservation, limit, arrived)
            return
        answers = prepared(
            services, exchange, request, prompt, params, engine_id(reply.id, request.request_id), priority=priority
        )
        async with running(services, exchange, [answers], reservation, arrived=arrived) as stream:
            await (reply.stream(exchange, stream) if request.stream else reply.whole(exchange, stream))


async def _tokenize(request: ChatRequest, services: Services, use: ToolUse, *, num_characters: int) -> TokenizedPrompt:
    return await tokenize_chat(
        services.engine.reader,
        request.messages,
        num_characters=num_characters,
        limited_param="messages" if request.truncate_prompt_tokens is None else None,
        tools=use.tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        add_special_tokens=bool(request.add_special_tokens),
        variables=template_variables(request.chat_template_kwargs, request.reasoning_effort),
    )


class ChatReply:
    """Writes the answer to one request, whole or in chunks."""

    def __init__(self, request: ChatRequest, services: Services, use: ToolUse, id: str) -> None:
        self.id = id
        self.use = use
        self._request = request
        self._services = services
        self._tokenizer: Tokenizer | None = services.engine.tokenizer
        self._created = int(time())

    def facts(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._services.model_name,
            "system_fingerprint": None,
        }

    # ---- whole

    async def whole(self, exchange: Exchange, stream: AnswerStream) -> None:
        (output,) = await stream.outputs()
        size = 10 * len(output.prompt_token_ids) if self._request.prompt_logprobs is not None else 0
        await exchange.reply(200, await off_loop(lambda: self._body(output), num_characters=size))

    def _body(self, output: RequestOutput) -> bytes:
        of_prompt = output.prompt_logprobs
        more = {
            "prompt_logprobs": None if of_prompt is None else prompt_entries(of_prompt, self._tokenizer),
            "prompt_token_ids": output.prompt_token_ids if self._request.return_token_ids else None,
        }
        return self._completion(output.outputs, Usage.of([output]), more)

    def _completion(
        self, answers: Iterable[CompletionOutput], usage: Usage, more: dict[str, Any] | None = None
    ) -> bytes:
        return completion_body(
            CHAT_OBJECT,
            encode(self.id)[1:-1],
            self._created,
            encode(self._services.model_name),
            b",".join([self._choice(answer) for answer in answers]),
            usage.to_json(),
            members(more or {}),
        )

    def _choice(self, answer: CompletionOutput) -> bytes:
        content: str | None = answer.text
        reason: str | None = answer.finish_reason
        message = b""
        if self.use.calls is not None:
            content, reason, message = self.use.calls.message(answer.text, reason)
        return chat_choice(
            answer.index,
            content,
            reason,
            answer.stop_reason,
            logprobs=encode(self.logprobs(answer.logprobs)),
            message=message,
            more=members({"token_ids": answer.token_ids if self._request.return_token_ids else None}),
        )

    def logprobs(self, entries: Any) -> dict[str, Any] | None:
        return None if entries is None else chat_logprobs(entries, self._tokenizer)

    # ---- in chunks

    async def stream(self, exchange: Exchange, stream: AnswerStream) -> None:
        options = self._request.stream_options
        includes_usage = options is not None and bool(options.include_usage)
        writer = ChatChunks(self, self._request, stream.requests[0], usage_is_null=includes_usage)
        with EventStream(exchange, stream.event_queue, self._services.options.sse_keep_alive_interval_s) as events:
            await events.follow(stream, writer.write)
            await events.end(writer.chunks.usage(writer.usage().to_json()) if includes_usage else b"")

    # ---- beams

    async def search_beams(
        self,
        exchange: Exchange,
        prompt: TokenizedPrompt,
        reservation: Reservation,
        limit: AnswerLimit,
        arrived: float,
    ) -> None:
        params = beam_params(self._request, limit, self._services.engine.settings.max_model_len - len(prompt.token_ids))
        found = await search_beams(
            self._services, exchange, prompt, self._request, params, reservation, arrived=arrived
        )
        if not self._request.logprobs:
            found = [replace(beam, logprobs=None) for beam in found]
        usage = Usage(len(prompt.token_ids), sum(len(beam.token_ids) for beam in found))
        await exchange.reply(200, self._completion(found, usage))


class ChatChunks:
    """Writes the deltas of one stream, and counts their tokens."""

    def __init__(self, reply: ChatReply, request: ChatRequest, answers: Answers, *, usage_is_null: bool) -> None:
        options = request.stream_options
        self.chunks = Chunks(
            reply.facts("chat.completion.chunk"),
            opening=b'"delta":{"content":',
            closing=b"}",
            always={"logprobs": None, "finish_reason": None},
            usage_is_null=usage_is_null,
        )
        self._reply = reply
        self._request = request
        self._answers = answers
        self._gives_usage = usage_is_null and options is not None and bool(options.continuous_usage_stats)
        self._is_plain = not (
            request.logprobs or request.return_token_ids or self._gives_usage or reply.use.calls is not None
        )
        self._is_begun = [False] * (request.n or 1)
        self._calls = reply.use.calls
        self._parsers = [] if self._calls is None else [self._calls.parser() for _ in self._is_begun]
        self._has_called = [False] * len(self._is_begun)
        self._has_told_prompt = False
        self._num_generated = 0

    def usage(self) -> Usage:
        return Usage(len(self._answers.request.prompt_token_ids), self._num_generated, self._answers.num_cached_tokens)

    def write(self, delta: AnswerDelta) -> bytes:
        self._num_generated += len(delta.token_ids)
        if self._is_plain and delta.finish_reason is None and self._is_begun[delta.index]:
            return self.chunks.text(delta.index, delta.text) if delta.text else b""
        if not self._is_begun[delta.index]:
            return self._begin(delta.index) + self._write(delta)
        return self._write(delta)

    def _begin(self, index: int) -> bytes:
        """Each choice starts with its role."""
        self._is_begun[index] = True
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        more: dict[str, Any] = {}
        if self._request.return_token_ids and not self._has_told_prompt:
            self._has_told_prompt = True
            more["prompt_token_ids"] = self._answers.request.prompt_token_ids.tolist()
        usage = Usage(len(self._answers.request.prompt_token_ids)).to_json() if self._gives_usage else None
        return self.chunks.choice(choice, usage, more)

    def _write(self, delta: AnswerDelta) -> bytes:
        if self._calls is not None:
            return self._write_parsed(delta, self._calls)
        return self._write_text(delta, delta.text, delta.finish_reason)

    def _write_parsed(self, delta: AnswerDelta, tool_calls: ToolCalls) -> bytes:
        """Text and calls as the parser finds them, then the end."""
        index = delta.index
        text, calls = "", []
        for piece in tool_calls.read(self._parsers[index], delta.text, is_end=delta.finish_reason is not None):
            if isinstance(piece, ContentDelta):
                text += piece.text
            else:
                calls.append(delta_object(piece))
        chunks = b""
        usage = self.usage().to_json() if self._gives_usage else None
        for call in calls:  # a chunk each: clients that read one entry of a chunk would lose the others
            self._has_called[index] = True
            said = {"content": text, "tool_calls": [call]} if text else {"tool_calls": [call]}
            text = ""
            choice = {"index": index, "delta": said, "logprobs": None, "finish_reason": None}
            chunks += self.chunks.choice(choice, usage)
        reason: str | None = delta.finish_reason
        if reason == "stop" and self._has_called[index]:
            reason = "tool_calls"
        return chunks + self._write_text(delta, text, reason)

    def _write_text(self, delta: AnswerDelta, text: str, reason: str | None) -> bytes:
        gives_tokens = bool(self._request.return_token_ids) and bool(delta.token_ids)
        if not (text or reason or delta.logprobs or gives_tokens):
            return b""
        more: dict[str, Any] = {"finish_reason": reason, "logprobs": self._reply.logprobs(delta.logprobs)}
        if reason is not None:
            more["stop_reason"] = delta.stop_reason
        if self._request.return_token_ids:
            more["token_ids"] = delta.token_ids
        usage = self.usage().to_json() if self._gives_usage else None
        return self.chunks.special(delta.index, text, more, usage)
