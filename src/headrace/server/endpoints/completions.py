"""POST /v1/completions: continuations of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from time import monotonic, time
from typing import Any

from headrace.engine.answer_stream import AnswerStream
from headrace.engine.answers import AnswerDelta, Answers
from headrace.engine.prompts import TokenizedPrompt
from headrace.openai.body import read
from headrace.openai.choices import TEXT_ID_PREFIX, TEXT_OBJECT, completion_body, encode, members, text_choice
from headrace.openai.errors import bad_request
from headrace.openai.logprobs import TextOffsets, completion_lists, prompt_entries
from headrace.openai.prompts import as_prompts
from headrace.openai.sampling import (
    AnswerLimit,
    check_context,
    check_num_sequences,
    completion_limit,
    completion_params,
)
from headrace.openai.schema.common import SamplingFields
from headrace.openai.schema.completions import CompletionRequest
from headrace.openai.usage import Usage
from headrace.server.endpoints.beams import beam_params, search_beams
from headrace.server.endpoints.generation import (
    answer_id,
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
from headrace.server.endpoints.prompting import estimated_tokens, off_loop, tokenize
from headrace.server.http.chunks import Chunks
from headrace.server.http.exchange import Exchange
from headrace.server.http.sse import EventStream
from headrace.server.services import Reservation, Services
from headrace.text import Tokenizer
from headrace.types import CompletionOutput, PromptLogprobs, RequestOutput, SamplingParams, TokenLogprobs

HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"


async def create_completion(services: Services, exchange: Exchange) -> None:
    arrived = monotonic()
    body = await exchange.read_body(services.options.max_body_bytes)
    request = read(CompletionRequest, body)
    check_model(services, request.model)
    priority = priority_of(services, request.priority)
    prompts = as_prompts(request.prompt)
    limit = completion_limit(request)
    params = completion_params(request, limits_of(services), limit)
    check_num_sequences(params, len(prompts))
    max_model_len = services.engine.settings.max_model_len
    num_tokens = estimated_tokens(prompts, max_model_len)
    with services.queue.reserve(len(prompts), num_tokens=num_tokens) as reservation:
        params = await services.engine.compiled(params)
        tokenized = await tokenize(
            services.engine.reader,
            prompts,
            add_special_tokens=request.add_special_tokens is not False,
            limited_param="prompt" if request.truncate_prompt_tokens is None else None,
        )
        tokenized = [truncated(prompt, request, limit, max_model_len) for prompt in tokenized]
        for prompt in tokenized:
            check_context(len(prompt.token_ids), limit, max_model_len, prompt_param="prompt")
        reservation.count_tokens(sum(len(prompt.token_ids) for prompt in tokenized))
        reply = CompletionReply(request, services, tokenized, answer_id(TEXT_ID_PREFIX, request.request_id, exchange))
        if request.use_beam_search:
            await reply.search_beams(exchange, reservation, limit, arrived)
            return
        own_id = engine_id(reply.id, request.request_id)
        requests = [
            prepared(
                services,
                exchange,
                request,
                prompt,
                _within(params, prompt, max_model_len),
                f"{own_id}-{position}",
                priority=priority,
            )
            for position, prompt in enumerate(tokenized)
        ]
        async with running(services, exchange, requests, reservation, arrived=arrived) as stream:
            await (reply.stream(exchange, stream) if request.stream else reply.whole(exchange, stream))


def _within(params: SamplingParams, prompt: TokenizedPrompt, max_model_len: int) -> SamplingParams:
    """The parameters with the default length shortened to the context. A given length has been checked."""
    left = max_model_len - len(prompt.token_ids)
    if params.max_tokens is None or params.max_tokens <= left:
        return params
    return replace(params, max_tokens=left, min_tokens=min(params.min_tokens, left))


def truncated(
    prompt: TokenizedPrompt, request: SamplingFields, limit: AnswerLimit, max_model_len: int
) -> TokenizedPrompt:
    """The last tokens of the prompt, as many as asked for; -1: as many as leave room for the answer. With
    `truncation_side` "right" the first ones."""
    asked = request.truncate_prompt_tokens
    if asked is None:
        return prompt
    if asked == -1:
        asked = max(1, max_model_len - max(1, limit.num_tokens or 1))
    if asked < 1:
        raise bad_request(
            f"truncate_prompt_tokens must be at least 1, or -1 for what the context holds, got {asked}",
            "truncate_prompt_tokens",
        )
    if len(prompt.token_ids) <= asked:
        return prompt
    is_right = request.truncation_side == "right"
    return TokenizedPrompt(None, prompt.token_ids[:asked] if is_right else prompt.token_ids[-asked:])


class CompletionReply:
    """Writes the answer to one request, whole or in chunks."""

    def __init__(
        self, request: CompletionRequest, services: Services, prompts: Sequence[TokenizedPrompt], id: str
    ) -> None:
        self.id = id
        self._request = request
        self._services = services
        self._tokenizer: Tokenizer | None = services.engine.tokenizer
        self._prompts = prompts
        self._n = request.n or 1
        self._scores_only = request.max_tokens == 0
        self._wants_logprobs = request.logprobs is not None
        self._as_ids = names_tokens_by_id(services, request.return_tokens_as_token_ids)
        self.facts: dict[str, Any] = {
            "id": id,
            "object": "text_completion",
            "created": int(time()),
            "model": services.answering(request.model),
            "system_fingerprint": None,
        }

    # ---- whole

    async def whole(self, exchange: Exchange, stream: AnswerStream) -> None:
        outputs = await stream.outputs()
        size = sum(len(output.prompt_token_ids) for output in outputs) if self._request.echo else 0
        has_logprobs = self._request.logprobs is not None or self._request.prompt_logprobs is not None
        body = await off_loop(lambda: self._body(outputs), num_characters=10 * size if has_logprobs else 0)
        await exchange.reply(200, body)

    def _body(self, outputs: Sequence[RequestOutput]) -> bytes:
        choices = [
            self._choice(position, output, answer)
            for position, output in enumerate(outputs)
            for answer in output.outputs
        ]
        usage = Usage.of(outputs)
        if self._scores_only:
            usage.num_generated = 0
        return self._completion(choices, usage)

    def _completion(self, choices: Iterable[bytes], usage: Usage) -> bytes:
        return completion_body(
            TEXT_OBJECT,
            encode(self.id)[1:-1],
            self.facts["created"],
            encode(self.facts["model"]),
            b",".join(choices),
            usage.to_json(),
        )

    def _choice(self, position: int, output: RequestOutput, answer: CompletionOutput) -> bytes:
        text = "" if self._scores_only else answer.text
        entries = None if answer.logprobs is None else () if self._scores_only else answer.logprobs
        more: dict[str, Any] = {"prompt_logprobs": None, "prompt_token_ids": None, "token_ids": None}
        if self._request.prompt_logprobs is not None and output.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_entries(output.prompt_logprobs, self._tokenizer)
        if self._request.return_token_ids:
            more["prompt_token_ids"] = output.prompt_token_ids
            more["token_ids"] = () if self._scores_only else answer.token_ids
        return text_choice(
            position * self._n + answer.index,
            self._prompt_text(position) + text if self._request.echo else text,
            "length" if self._scores_only else answer.finish_reason,
            None if self._scores_only else answer.stop_reason,
            logprobs=encode(self._logprobs(position, entries, output.prompt_logprobs)),
            more=members(more),
        )

    def _logprobs(
        self,
        position: int,
        entries: Sequence[TokenLogprobs] | None,
        of_prompt: PromptLogprobs | None,
        offsets: TextOffsets | None = None,
    ) -> dict[str, Any] | None:
        """`offsets`: those of the stream; default: those of a whole answer."""
        if entries is None:
            return None
        is_echoed = bool(self._request.echo) and of_prompt is not None
        offsets = offsets or self.offsets(position, is_echoed=is_echoed)
        if not is_echoed or of_prompt is None:
            return completion_lists(entries, self._tokenizer, offsets=offsets, as_ids=self._as_ids)
        first_token = int(self._prompts[position].token_ids[0])
        return completion_lists(
            (*of_prompt, *entries), self._tokenizer, first_token=first_token, offsets=offsets, as_ids=self._as_ids
        )

    def offsets(self, position: int, *, is_echoed: bool) -> TextOffsets:
        return TextOffsets(
            self._tokenizer,
            skip_special_tokens=self._request.skip_special_tokens is not False,
            prompt=self._prompt_text(position) if is_echoed else "",
            num_prompt_tokens=len(self._prompts[position].token_ids) if is_echoed else 0,
        )

    def _prompt_text(self, position: int) -> str:
        prompt = self._prompts[position]
        if prompt.text is not None:
            return prompt.text
        if self._tokenizer is None:
            return ""
        text = self._tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        return text if self._scores_only else text.rstrip(HALF_CHARACTER)  # the answer completes it

    # ---- in chunks

    async def stream(self, exchange: Exchange, stream: AnswerStream) -> None:
        includes_usage = includes_final_usage(self._request.stream_options, self._services)
        gives_usage = includes_running_usage(self._request.stream_options, self._services)
        writer = CompletionChunks(
            self, self._request, stream.requests, usage_is_null=includes_usage, gives_usage=gives_usage
        )
        with EventStream(exchange, stream.event_queue, self._services.options.sse_keep_alive_interval_s) as events:
            await events.follow(stream, writer.write)
            await events.end(writer.chunks.usage(writer.usage().to_json()) if includes_usage else b"")

    # ---- beams

    async def search_beams(
        self, exchange: Exchange, reservation: Reservation, limit: AnswerLimit, arrived: float
    ) -> None:
        params = beam_params(self._request, limit, self._services.engine.settings.max_model_len)
        choices: list[bytes] = []
        usage = Usage(sum(len(prompt.token_ids) for prompt in self._prompts))
        for position, prompt in enumerate(self._prompts):
            found = await search_beams(
                self._services, exchange, prompt, self._request, params, reservation, arrived=arrived
            )
            for beam in found:
                usage.num_generated += len(beam.token_ids)
                logprobs = self._logprobs(position, beam.logprobs if self._wants_logprobs else None, None)
                index = position * self._n + beam.index
                choices.append(text_choice(index, beam.text, beam.finish_reason, logprobs=encode(logprobs)))
        await exchange.reply(200, self._completion(choices, usage))


class CompletionChunks:
    """Writes the deltas of one stream, and counts their tokens."""

    def __init__(
        self,
        reply: CompletionReply,
        request: CompletionRequest,
        requests: Sequence[Answers],
        *,
        usage_is_null: bool,
        gives_usage: bool = False,
    ) -> None:
        self.chunks = Chunks(
            reply.facts,
            opening=b'"text":',
            closing=b"",
            always={"logprobs": None, "finish_reason": None, "stop_reason": None},
            usage_is_null=usage_is_null,
        )
        self._reply = reply
        self._request = request
        self._requests = requests
        self._gives_usage = gives_usage
        self._is_plain = request.logprobs is None and not request.return_token_ids and not self._gives_usage
        self._is_begun = [not (request.echo or request.return_token_ids)] * (len(requests) * reply._n)
        self._offsets: list[TextOffsets | None] = [None] * len(self._is_begun)
        self._num_generated = 0

    def usage(self) -> Usage:
        return Usage(
            sum(len(answers.request.prompt_token_ids) for answers in self._requests),
            self._num_generated,
            sum(answers.num_cached_tokens for answers in self._requests),
        )

    def write(self, delta: AnswerDelta) -> bytes:
        index = delta.position * self._reply._n + delta.index
        self._num_generated += 0 if self._reply._scores_only else len(delta.token_ids)
        if self._is_plain and delta.finish_reason is None and self._is_begun[index]:
            return self.chunks.text(index, delta.text) if delta.text else b""
        return self._write_special(delta.position, index, delta)

    def _write_special(self, position: int, index: int, delta: AnswerDelta) -> bytes:
        reply = self._reply
        text = delta.text
        entries, tokens, reason, stop_reason = delta.logprobs, delta.token_ids, delta.finish_reason, delta.stop_reason
        if reply._scores_only:
            if reason is None:
                return b""
            text, entries, tokens, reason, stop_reason = "", None if entries is None else [], [], "length", None
        elif not (text or reason or entries or (self._request.return_token_ids and tokens)):
            return b""
        more: dict[str, Any] = {"finish_reason": reason, "stop_reason": stop_reason}
        of_prompt = None
        if not self._is_begun[index]:
            self._is_begun[index] = True
            of_prompt = self._requests[position].prompt_logprobs
            if self._request.echo:
                text = reply._prompt_text(position) + text
            if self._request.return_token_ids:
                more["prompt_token_ids"] = self._requests[position].request.prompt_token_ids.tolist()
        if self._request.return_token_ids:
            more["token_ids"] = tokens
        offsets = self._offsets[index]
        if offsets is None and entries is not None:
            is_echoed = bool(self._request.echo) and of_prompt is not None
            offsets = self._offsets[index] = reply.offsets(position, is_echoed=is_echoed)
        more["logprobs"] = reply._logprobs(position, entries, of_prompt, offsets)
        return self.chunks.special(index, text, more, self.usage().to_json() if self._gives_usage else None)
