"""POST /v1/chat/completions: the assistant's next message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from time import monotonic, time
from typing import Any

from headrace.engine.answer_stream import AnswerStream
from headrace.engine.answers import AnswerDelta, Answers
from headrace.engine.prompts import TokenizedPrompt
from headrace.openai.answer_format import (
    AnswerFormat,
    AnswerMessage,
    AnswerUse,
    num_reasoning_tokens,
)
from headrace.openai.body import read
from headrace.openai.choices import CHAT_ID_PREFIX, CHAT_OBJECT, chat_choice, completion_body, encode, members
from headrace.openai.logprobs import chat_logprobs, prompt_entries
from headrace.openai.prompts import template_variables
from headrace.openai.sampling import AnswerLimit, chat_limit, chat_params, check_context
from headrace.openai.schema.chat import ChatRequest
from headrace.openai.tool_use import delta_object
from headrace.openai.usage import Usage
from headrace.server.endpoints.beams import beam_params, search_beams
from headrace.server.endpoints.completions import truncated
from headrace.server.endpoints.generation import (
    answer_id,
    answer_use_of,
    check_model,
    engine_id,
    includes_final_usage,
    includes_running_usage,
    limits_of,
    names_tokens_by_id,
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
from headrace.text.answer_parts import ContentDelta, ReasoningDelta
from headrace.types import CompletionOutput, RequestOutput


async def create_chat_completion(services: Services, exchange: Exchange) -> None:
    arrived = monotonic()
    body = await exchange.read_body(services.options.max_body_bytes)
    request = read(ChatRequest, body)
    check_model(services, request.model)
    priority = priority_of(services, request.priority)
    use = answer_use_of(services, request)
    limit = chat_limit(request)
    params = chat_params(request, limits_of(services), limit, **use.params)
    max_model_len = services.engine.settings.max_model_len
    num_tokens = estimated_tokens([[request.messages, use.tool_use.tools]], max_model_len)
    with services.queue.reserve(1, num_tokens=num_tokens) as reservation:
        params = await services.engine.compiled(params)
        prompt = await tokenized_chat(request, services, use, num_characters=len(body))
        prompt = truncated(prompt, request, limit, max_model_len)
        check_context(len(prompt.token_ids), limit, max_model_len, prompt_param="messages")
        reservation.count_tokens(len(prompt.token_ids))
        is_inside = use.is_inside(prompt.text, continued(request))
        params = use.constrained(params, is_inside, services.engine.get_tokenizer())
        reply = ChatReply(
            request, services, use.format(is_inside), answer_id(CHAT_ID_PREFIX, request.request_id, exchange)
        )
        if request.use_beam_search:
            await reply.search_beams(exchange, prompt, reservation, limit, arrived)
            return
        answers = prepared(
            services, exchange, request, prompt, params, engine_id(reply.id, request.request_id), priority=priority
        )
        async with running(services, exchange, [answers], reservation, arrived=arrived) as stream:
            await (reply.stream(exchange, stream) if request.stream else reply.whole(exchange, stream))


def continued(request: ChatRequest) -> str | None:
    """The text that the answer continues."""
    content = request.messages[-1].get("content") if request.continue_final_message else None
    return content if isinstance(content, str) else None


def _echoed(request: ChatRequest) -> str:
    """The text before the answer, with `echo`: the last message, if the answer continues it or is of its role."""
    last = request.messages[-1] if request.echo and request.messages else {}
    content = last.get("content")
    is_own = last.get("role") == "assistant" or request.add_generation_prompt is False
    return content if is_own and isinstance(content, str) else ""


async def tokenized_chat(
    request: ChatRequest, services: Services, use: AnswerUse, *, num_characters: int
) -> TokenizedPrompt:
    return await tokenize_chat(
        services.engine.reader,
        request.messages,
        num_characters=num_characters,
        limited_param="messages" if request.truncate_prompt_tokens is None else None,
        tools=use.tool_use.tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        add_special_tokens=bool(request.add_special_tokens),
        variables=template_variables(request.chat_template_kwargs, request.reasoning_effort),
    )


class ChatReply:
    """Writes the answer to one request, whole or in chunks."""

    def __init__(self, request: ChatRequest, services: Services, format: AnswerFormat | None, id: str) -> None:
        """`format`: how an answer is parsed; None: it is text."""
        self.id = id
        self.format = format
        self._request = request
        self._services = services
        self._tokenizer: Tokenizer | None = services.engine.tokenizer
        self._created = int(time())
        self._model_name = services.answering(request.model)
        self.echoed = _echoed(request)
        self._as_ids = names_tokens_by_id(services, request.return_tokens_as_token_ids)

    def facts(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model_name,
            "system_fingerprint": None,
        }

    # ---- whole

    async def whole(self, exchange: Exchange, stream: AnswerStream) -> None:
        (output,) = await stream.outputs()
        size = 10 * len(output.prompt_token_ids) if self._request.prompt_logprobs is not None else 0
        if self.format is not None:
            size += sum(len(answer.text) for answer in output.outputs)
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
        parsed = [(answer, self.message(answer)) for answer in answers]
        if self.has_reasoning:
            usage.num_reasoning = sum(self.count(message.reasoning) for _, message in parsed)
        return completion_body(
            CHAT_OBJECT,
            encode(self.id)[1:-1],
            self._created,
            encode(self._model_name),
            b",".join([self.choice(answer, message) for answer, message in parsed]),
            usage.to_json(),
            members(more or {}),
        )

    def message(self, answer: CompletionOutput) -> AnswerMessage:
        if self.format is None:
            return AnswerMessage(answer.text, answer.finish_reason, b"", "")
        return self.format.message(answer.text, answer.finish_reason)

    def choice(self, answer: CompletionOutput, message: AnswerMessage) -> bytes:
        shows_tokens = self._request.return_token_ids and not self.hides_reasoning
        return chat_choice(
            answer.index,
            self.echoed + (message.content or "") if self.echoed else message.content,
            message.finish_reason,
            answer.stop_reason,
            logprobs=encode(self.logprobs(answer.logprobs)),
            message=message.more,
            more=members({"token_ids": answer.token_ids if shows_tokens else None}),
        )

    @property
    def has_reasoning(self) -> bool:
        return self.format is not None and self.format.reasoning is not None

    @property
    def hides_reasoning(self) -> bool:
        return self.format is not None and self.format.hides_reasoning

    def count(self, reasoning: str) -> int:
        return num_reasoning_tokens(reasoning, self._tokenizer)

    def logprobs(self, entries: Any) -> dict[str, Any] | None:
        if entries is None or self.hides_reasoning:
            return None
        return chat_logprobs(entries, self._tokenizer, as_ids=self._as_ids)

    # ---- in chunks

    async def stream(self, exchange: Exchange, stream: AnswerStream) -> None:
        includes_usage = includes_final_usage(self._request.stream_options, self._services)
        gives_usage = includes_running_usage(self._request.stream_options, self._services)
        writer = ChatChunks(
            self, self._request, stream.requests[0], usage_is_null=includes_usage, gives_usage=gives_usage
        )
        with EventStream(exchange, stream.event_queue, self._services.options.sse_keep_alive_interval_s) as events:
            await events.follow(stream, writer.write)
            await events.end(writer.chunks.usage(writer.final_usage().to_json()) if includes_usage else b"")

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

    def __init__(
        self,
        reply: ChatReply,
        request: ChatRequest,
        answers: Answers,
        *,
        usage_is_null: bool,
        gives_usage: bool = False,
    ) -> None:
        """`usage_is_null`: the usage comes at the end; `gives_usage`: each chunk has it too."""
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
        self._gives_usage = gives_usage
        self._gives_tokens = bool(request.return_token_ids) and not reply.hides_reasoning
        self._is_plain = not (request.logprobs or self._gives_tokens or self._gives_usage or reply.format is not None)
        self._is_begun = [False] * (request.n or 1)
        self._format = reply.format
        self._readers = [] if self._format is None else [self._format.reader() for _ in self._is_begun]
        self._reasoning: list[list[str]] = [[] for _ in self._is_begun]
        self._has_called = [False] * len(self._is_begun)
        self._has_told_prompt = False
        self._num_generated = 0

    def usage(self) -> Usage:
        return Usage(len(self._answers.request.prompt_token_ids), self._num_generated, self._answers.num_cached_tokens)

    def final_usage(self) -> Usage:
        """The usage with the tokens of the reasoning, which are counted once."""
        usage = self.usage()
        if self._reply.has_reasoning:
            usage.num_reasoning = sum(self._reply.count("".join(texts)) for texts in self._reasoning)
        return usage

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
            "delta": {"role": "assistant", "content": self._reply.echoed},
            "logprobs": None,
            "finish_reason": None,
        }
        more: dict[str, Any] = {}
        if self._gives_tokens and not self._has_told_prompt:
            self._has_told_prompt = True
            more["prompt_token_ids"] = self._answers.request.prompt_token_ids.tolist()
        usage = Usage(len(self._answers.request.prompt_token_ids)).to_json() if self._gives_usage else None
        return self.chunks.choice(choice, usage, more)

    def _write(self, delta: AnswerDelta) -> bytes:
        if self._format is not None:
            return self._write_parsed(delta, shows_reasoning=self._format.shows_reasoning)
        return self._write_text(delta, delta.text, delta.finish_reason)

    def _write_parsed(self, delta: AnswerDelta, *, shows_reasoning: bool) -> bytes:
        """Reasoning, text and calls as the parsers find them, then the end."""
        index, text, chunks = delta.index, "", b""
        for piece in self._readers[index].read(delta.text, is_end=delta.finish_reason is not None):
            if isinstance(piece, ContentDelta):
                text += piece.text
            elif isinstance(piece, ReasoningDelta):
                self._reasoning[index].append(piece.text)
                if shows_reasoning:
                    chunks += self._chunk(index, text, {"reasoning": piece.text, "reasoning_content": piece.text})
                    text = ""
            else:  # a chunk each: clients that read one entry of a chunk would lose the others
                self._has_called[index] = True
                chunks += self._chunk(index, text, {"tool_calls": [delta_object(piece)]})
                text = ""
        reason: str | None = delta.finish_reason
        if reason == "stop" and self._has_called[index]:
            reason = "tool_calls"
        return chunks + self._write_text(delta, text, reason)

    def _chunk(self, index: int, text: str, said: dict[str, Any]) -> bytes:
        """A chunk with something else than text, and the text before it."""
        usage = self.usage().to_json() if self._gives_usage else None
        said = {"content": text, **said} if text else said
        return self.chunks.choice({"index": index, "delta": said, "logprobs": None, "finish_reason": None}, usage)

    def _write_text(self, delta: AnswerDelta, text: str, reason: str | None) -> bytes:
        logprobs = self._reply.logprobs(delta.logprobs)
        if not (text or reason or (logprobs and delta.logprobs) or (self._gives_tokens and delta.token_ids)):
            return b""
        more: dict[str, Any] = {"finish_reason": reason, "logprobs": logprobs}
        if reason is not None:
            more["stop_reason"] = delta.stop_reason
        if self._gives_tokens:
            more["token_ids"] = delta.token_ids
        usage = self.usage().to_json() if self._gives_usage else None
        return self.chunks.special(delta.index, text, more, usage)
