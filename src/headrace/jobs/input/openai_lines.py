"""OpenAI's batch format: input lines {"custom_id", "method", "url", "body"}, and its output lines.

Bodies and completion objects are those of the server (`headrace.openai`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any, Literal, TypeAlias

import msgspec

from headrace.engine.prompts import Messages
from headrace.errors import RequestError, nearest
from headrace.jobs.input.line_output import LineAnswer, LineOutput
from headrace.jobs.input.reply import ENGINE_ERROR, EXPIRED, POISON, JobFacts, encode, message_of, usage
from headrace.openai.answer_format import AnswerFormat, AnswerMessage, num_reasoning_tokens
from headrace.openai.body import convert
from headrace.openai.choices import (
    CHAT_ID_PREFIX,
    CHAT_OBJECT,
    TEXT_ID_PREFIX,
    TEXT_OBJECT,
    chat_choice,
    completion_body,
    text_choice,
)
from headrace.openai.embeddings import (
    UNSUPPORTED_IN_POOLING,
    EmbeddingFormat,
    embedding_format,
    embedding_inputs,
)
from headrace.openai.errors import INVALID_REQUEST_ERROR, MODEL_NOT_FOUND, SERVER_ERROR, UNKNOWN, error_object
from headrace.openai.fields import BATCH_REASONS, NOT_IN_BATCH, refusal
from headrace.openai.logprobs import TextOffsets, chat_logprobs, completion_lists
from headrace.openai.prompts import as_prompts, template_variables
from headrace.openai.responses import RESPONSE_ID_PREFIX, ResponseFields, ResponseWriter
from headrace.openai.sampling import check_label, check_tool_choice
from headrace.openai.schema.chat import ChatRequest
from headrace.openai.schema.completions import CompletionRequest
from headrace.openai.schema.embeddings import EmbeddingRequest, PooledRequest, RerankRequest, ScoreRequest
from headrace.openai.scoring import RerankFormat, ScoreFormat, TextPairs, rerank_format, rerank_texts, score_texts
from headrace.openai.usage import Usage

Endpoint = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/rerank", "/v1/score"
]

CHAT: Endpoint = "/v1/chat/completions"
COMPLETIONS: Endpoint = "/v1/completions"
EMBEDDINGS: Endpoint = "/v1/embeddings"
RESPONSES: Endpoint = "/v1/responses"
RERANK: Endpoint = "/v1/rerank"
SCORE: Endpoint = "/v1/score"
ENDPOINTS: tuple[Endpoint, ...] = (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, RERANK, SCORE)
OTHER_PATHS: dict[str, Endpoint] = {"/rerank": RERANK, "/v2/rerank": RERANK, "/score": SCORE}  # vLLM's
DUPLICATE_ID = "duplicate_custom_id"
ID_PREFIX = "batch_req_"
RESULT_START = b'{"id":"' + ID_PREFIX.encode()  # of output lines in this format, and of no others

_PROMPT_PARAMS: dict[Endpoint, str] = {
    CHAT: "messages",
    COMPLETIONS: "prompt",
    EMBEDDINGS: "input",
    RESPONSES: "input",
    RERANK: "documents",
    SCORE: "text_2",
}
_ENVELOPE = ("custom_id", "method", "url", "body")
_LABELS = ("cache_salt", "request_id")

# Fields that decide how an answer is parsed, or that need its format.
_PARSED_FIELDS = {"tools", "tool_choice", "include_reasoning", "thinking_token_budget"}

# Fields that differ from line to line. `read_body` checks them, and the other fields are checked once for each set of
# values (`fields.ParamsReader`).
CHECKED_APART = {
    CHAT: frozenset({"messages", "model", "chat_template_kwargs", *_PARSED_FIELDS, *_LABELS}),
    COMPLETIONS: frozenset({"prompt", "model", *_LABELS}),
    RESPONSES: frozenset(
        {"input", "instructions", "model", "chat_template_kwargs", "reasoning", "tools", "tool_choice", *_LABELS}
    ),
}


def is_openai(line: Mapping[str, Any]) -> bool:
    return "body" in line or "url" in line


def read_endpoint(line: Mapping[str, Any]) -> Endpoint:
    """The url of a well-formed envelope."""
    is_plain_chat = len(line) == len(_ENVELOPE) and line.get("method") == "POST" and line.get("url") == CHAT
    if is_plain_chat and type(line.get("body")) is dict and type(line.get("custom_id")) is str and line["custom_id"]:
        return CHAT  # most lines
    for name in line:
        if name not in _ENVELOPE:
            raise _bad_envelope(f"unknown field {name!r} beside custom_id, method, url and body", name)
    custom_id, method, url = line.get("custom_id"), line.get("method"), line.get("url")
    if not isinstance(custom_id, str) or not custom_id:
        raise _bad_envelope(f"custom_id must be a non-empty text, got {custom_id!r}", "custom_id")
    if method != "POST":
        raise _bad_envelope(f"method must be 'POST', got {method!r}", "method")
    if not isinstance(line.get("body"), dict):
        raise _bad_envelope("body must be an object", "body")
    for endpoint in ENDPOINTS:
        if endpoint == OTHER_PATHS.get(str(url), url):
            return endpoint
    known = f"{', '.join(ENDPOINTS[:-1])} or {ENDPOINTS[-1]}"
    raise _bad_envelope(f"url must be {known}, got {url!r}{nearest(str(url), ENDPOINTS)}", "url")


class PooledFields(msgspec.Struct, frozen=True, gc=False):
    """What a line of a pooling model asks for, beside its texts."""

    num_first: int = 0  # texts that are the first of a pair; 0: each is embedded on its own
    dimensions: int | None = None
    use_activation: bool | None = None
    truncate: int | None = None
    prompt_name: str | None = None
    add_special_tokens: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether its texts are only to be embedded, as the model does by itself."""
        return self == _PLAIN_POOLING


_PLAIN_POOLING = PooledFields()


class PooledBody(msgspec.Struct, frozen=True, gc=False):
    """A body for /v1/embeddings, /v1/rerank or /v1/score."""

    prompts: list[str | list[int]]
    fields: PooledFields
    format: EmbeddingFormat | RerankFormat | ScoreFormat
    cache_salt: str | None
    model: str | None


def read_pooled_body(body: dict[str, Any], endpoint: Endpoint) -> PooledBody:
    if endpoint == EMBEDDINGS:
        return _embedding_body(convert(EmbeddingRequest, body, unsupported=UNSUPPORTED_IN_POOLING))
    if endpoint == RERANK:
        ranking = convert(RerankRequest, body, unsupported=UNSUPPORTED_IN_POOLING)
        pairs = rerank_texts(ranking)
        return _pairs_body(ranking, pairs, rerank_format(ranking, pairs))
    scoring = convert(ScoreRequest, body, unsupported=UNSUPPORTED_IN_POOLING)
    return _pairs_body(scoring, score_texts(scoring), ScoreFormat())


def _embedding_body(request: EmbeddingRequest) -> PooledBody:
    _refuse_priority(request)
    prompts: list[Any] = embedding_inputs(request)
    fields = PooledFields(
        dimensions=request.dimensions,
        use_activation=request.use_activation,
        truncate=request.truncate_prompt_tokens,
        prompt_name=request.prompt_name,
        add_special_tokens=request.add_special_tokens is not False,
    )
    return PooledBody(prompts, fields, embedding_format(request), request.cache_salt, request.model)


def _pairs_body(request: PooledRequest, pairs: TextPairs, format: RerankFormat | ScoreFormat) -> PooledBody:
    _refuse_priority(request)
    fields = PooledFields(
        num_first=len(pairs.firsts), use_activation=request.use_activation, truncate=request.truncate_prompt_tokens
    )
    return PooledBody([*pairs.firsts, *pairs.seconds], fields, format, request.cache_salt, request.model)


def _refuse_priority(request: PooledRequest) -> None:
    error = refusal("priority", request.priority, NOT_IN_BATCH["priority"], BATCH_REASONS)
    if error is not None:
        raise error


class Body(msgspec.Struct, frozen=True, gc=False):
    """What differs from line to line. One of `prompt`, `prompts` and `messages` is set."""

    prompt: str | list[int] | None
    messages: Messages | None
    template_options: Mapping[str, Any]
    cache_salt: str | None
    model: str | None
    tool_request: ChatRequest | None = None  # if it has tools, or says whether to include reasoning
    prompts: list[str | list[int]] | None = None  # instead of `prompt`, if there are several


def read_body(body: dict[str, Any], endpoint: Endpoint) -> Body:
    """The common case is tested here in a few operations. Anything else is converted in full, which refuses it or
    gives the value."""
    model, prompt, messages = body.get("model"), None, None
    if (model is not None and type(model) is not str) or "cache_salt" in body or "request_id" in body:
        request = convert(CompletionRequest if endpoint == COMPLETIONS else ChatRequest, body)
        for name in _LABELS:
            check_label(name, getattr(request, name))
    if endpoint == COMPLETIONS:
        prompt = body.get("prompt")
        if type(prompt) is str:
            return Body(prompt, None, {}, body.get("cache_salt"), model)
        prompts = _prompts(body)
        if len(prompts) == 1:
            return Body(prompts[0], None, {}, body.get("cache_salt"), model)
        return Body(None, None, {}, body.get("cache_salt"), model, prompts=prompts)
    messages = body.get("messages")
    if type(messages) is not list or set(map(type, messages)) != {dict}:
        messages = convert(ChatRequest, body).messages
    tools = _tool_request(body) if _PARSED_FIELDS & body.keys() else None
    return Body(None, messages, _template_options(body), body.get("cache_salt"), model, tools)


def _tool_request(body: dict[str, Any]) -> ChatRequest | None:
    request = convert(ChatRequest, body)
    check_tool_choice(request)
    about_reasoning = (request.include_reasoning, request.thinking_token_budget)
    return request if request.tools or about_reasoning != (None, None) else None


def _prompts(body: dict[str, Any]) -> list[str | list[int]]:
    prompts: list[Any] = as_prompts(convert(CompletionRequest, body).prompt)
    return prompts


def _template_options(body: dict[str, Any]) -> Mapping[str, Any]:
    options, effort = body.get("chat_template_kwargs"), body.get("reasoning_effort")
    if options is None and effort is None:
        return {}
    request = convert(ChatRequest, body)
    return template_variables(request.chat_template_kwargs, request.reasoning_effort)


def _bad_envelope(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="invalid_line")


Shape: TypeAlias = EmbeddingFormat | AnswerFormat | ResponseFields | RerankFormat | ScoreFormat


class OpenAIReply(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=2):
    index: int
    custom_id: str | None
    endpoint: Endpoint | None  # None: the envelope is broken; the error is the line's and there is no response
    other_id: bytes = b""  # a custom_id that is not text, as JSON: refused, and written to the error line as given
    shape: Shape | None = None  # None: a completion object with plain text
    shows_special: bool = False  # a completion whose text has special tokens: they count in `text_offset`
    adapter: str | None = None  # the `model` of the answer; None: the job's

    def with_format(self, format: AnswerFormat | None) -> OpenAIReply:
        """The same with how the parts of the answer are found."""
        if isinstance(self.shape, ResponseFields):
            return msgspec.structs.replace(self, shape=msgspec.structs.replace(self.shape, format=format))
        return msgspec.structs.replace(self, shape=format)

    def answer(self, output: LineOutput, facts: JobFacts) -> bytes:
        own_id = b"%b-%d" % (facts.job_id_text, self.index)
        facts = facts if self.adapter is None else replace(facts, model_name=self.adapter)
        if self.shape is None:
            body = self._completion(output, facts, own_id)
        else:
            body = _shaped(self.shape, output, facts, own_id)
        return _ANSWER % (own_id, encode(self.custom_id), own_id, body)

    def _completion(self, output: LineOutput, facts: JobFacts, own_id: bytes) -> bytes:
        id_prefix, kind, choice = _CHAT_PARTS if self.endpoint == CHAT else _TEXT_PARTS
        if self.shows_special:
            choice = _text_choice_with_special
        answers = output.answers
        choices = choice(answers[0], facts) if len(answers) == 1 else b",".join([choice(a, facts) for a in answers])
        return completion_body(kind, id_prefix + own_id, facts.now(), facts.model_name_text, choices, usage(output))

    def error(self, error: RequestError, facts: JobFacts) -> bytes:
        if error.code == EXPIRED:
            return self._line(facts, error={"code": error.code, "message": str(error)})
        message = message_of(error, self.index)
        if self.endpoint is None:
            return self._line(facts, error={"code": error.code, "message": message})
        is_ours = error.code in (ENGINE_ERROR, POISON)
        kind = SERVER_ERROR if is_ours else INVALID_REQUEST_ERROR
        param = error.param
        if param == "prompt" and error.code != UNKNOWN:  # the engine's name
            param = _PROMPT_PARAMS[self.endpoint]
        body = error_object(message, type=kind, param=param, code=error.code)
        status_code = 500 if is_ours else 404 if error.code == MODEL_NOT_FOUND else 400
        return self._line(facts, response=self._response(status_code, body, facts))

    def _line(
        self, facts: JobFacts, *, response: _Response | None = None, error: dict[str, Any] | None = None
    ) -> bytes:
        custom_id = msgspec.Raw(self.other_id) if self.other_id else self.custom_id
        return encode(_Line(facts.id_of(ID_PREFIX, self.index), custom_id, response, error))

    def _response(self, status_code: int, body: dict[str, object], facts: JobFacts) -> _Response:
        return _Response(status_code, facts.id_of("req_", self.index), body)


# The objects of an error line, with their fields in the order of the output.


class _Line(msgspec.Struct, gc=False):
    id: str
    custom_id: str | msgspec.Raw | None
    response: _Response | None
    error: dict[str, Any] | None


class _Response(msgspec.Struct, gc=False):
    status_code: int
    request_id: str
    body: dict[str, object]


_ANSWER = (
    b'{"id":"batch_req_%b","custom_id":%b,"response":{"status_code":200,"request_id":"req_%b","body":%b},"error":null}'
)


def _shaped(shape: Shape, output: LineOutput, facts: JobFacts, own_id: bytes) -> bytes:
    """The body of an answer that is not a completion object with plain text."""
    if isinstance(shape, EmbeddingFormat):
        return shape.body(output.pooled, facts.model_name_text, output.num_prompt_tokens)
    if isinstance(shape, RerankFormat | ScoreFormat):
        model, num_tokens = facts.model_name_text, output.num_prompt_tokens
        return shape.body(output.pooled, model, num_tokens, id=own_id, created=facts.now())
    if isinstance(shape, ResponseFields):
        return _response(shape, output, facts, own_id.decode())
    messages = [shape.message(answer.text, answer.finish_reason) for answer in output.answers]
    pairs = zip(output.answers, messages, strict=True)
    hides = shape.hides_reasoning
    choices = b",".join([_parsed_choice(answer, message, facts, hides=hides) for answer, message in pairs])
    num_reasoning = None
    if shape.reasoning is not None:
        num_reasoning = sum(num_reasoning_tokens(message.reasoning, facts.tokenizer) for message in messages)
    own_id = CHAT_ID_PREFIX.encode() + own_id
    return completion_body(
        CHAT_OBJECT, own_id, facts.now(), facts.model_name_text, choices, usage(output, num_reasoning)
    )


def _response(fields: ResponseFields, output: LineOutput, facts: JobFacts, own_id: str) -> bytes:
    numbers = count()
    writer = ResponseWriter(
        fields,
        facts.tokenizer,
        id=RESPONSE_ID_PREFIX + own_id,
        make_id=lambda prefix: f"{prefix}{own_id}-{next(numbers)}",
        model_name=facts.model_name,
        created_at=facts.now(),
    )
    answer = output.answers[0]
    usage = Usage(output.num_prompt_tokens, output.num_generated_tokens, output.num_cached_tokens)
    return encode(writer.finished(answer.text, answer.logprobs, answer.finish_reason, usage))


def _parsed_choice(answer: LineAnswer, message: AnswerMessage, facts: JobFacts, *, hides: bool) -> bytes:
    logprobs = None if answer.logprobs is None or hides else chat_logprobs(answer.logprobs, facts.tokenizer)
    return chat_choice(
        answer.index,
        message.content,
        message.finish_reason,
        answer.stop_reason,
        logprobs=encode(logprobs),
        message=message.more,
    )


def _chat_choice(answer: LineAnswer, facts: JobFacts) -> bytes:
    if answer.logprobs is None:
        return chat_choice(answer.index, answer.text, answer.finish_reason, answer.stop_reason)
    logprobs = encode(chat_logprobs(answer.logprobs, facts.tokenizer))
    return chat_choice(answer.index, answer.text, answer.finish_reason, answer.stop_reason, logprobs=logprobs)


def _text_choice(answer: LineAnswer, facts: JobFacts, *, skip_special_tokens: bool = True) -> bytes:
    if answer.logprobs is None:
        return text_choice(answer.index, answer.text, answer.finish_reason, answer.stop_reason)
    offsets = TextOffsets(facts.tokenizer, skip_special_tokens=skip_special_tokens)
    logprobs = encode(completion_lists(answer.logprobs, facts.tokenizer, offsets=offsets))
    return text_choice(answer.index, answer.text, answer.finish_reason, answer.stop_reason, logprobs=logprobs)


def _text_choice_with_special(answer: LineAnswer, facts: JobFacts) -> bytes:
    return _text_choice(answer, facts, skip_special_tokens=False)


_CHAT_PARTS = (CHAT_ID_PREFIX.encode(), CHAT_OBJECT, _chat_choice)
_TEXT_PARTS = (TEXT_ID_PREFIX.encode(), TEXT_OBJECT, _text_choice)
