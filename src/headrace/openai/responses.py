"""The requests and answers of /v1/responses: OpenAI's Responses API, without stored state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.openai.errors import INVALID_TYPE, UNKNOWN, bad_request, not_supported
from headrace.openai.fields import note_ignored
from headrace.openai.logprobs import chat_entries
from headrace.openai.sampling import (
    NO_DEFAULTS,
    AnswerLimit,
    Limits,
    check_label,
    check_logprobs,
    sampling_params,
)
from headrace.openai.schema.common import SamplingFields
from headrace.openai.schema.responses import ResponsesRequest
from headrace.openai.usage import Usage
from headrace.text import Tokenizer
from headrace.types import SamplingParams, TokenLogprobs

LOGPROBS = "message.output_text.logprobs"
RESPONSE_ID_PREFIX = "resp_"
ITEM_ID_PREFIX = "msg_"
_COPIED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "ignore_eos", "priority", "cache_salt", "request_id", "stream"),
)
_NOT_OF_RESPONSES = ("n", "best_of", "logprobs", "prompt_logprobs")  # a response has one message


def responses_limit(request: ResponsesRequest, default: int | None = None) -> AnswerLimit:
    given = request.max_output_tokens
    return AnswerLimit(default if given is None else given, "max_output_tokens")


def responses_params(
    request: ResponsesRequest, limits: Limits, limit: AnswerLimit, *, defaults: Mapping[str, Any] = NO_DEFAULTS
) -> SamplingParams:
    """`defaults`: for fields that the request does not give."""
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
        defaults={name: value for name, value in defaults.items() if name not in _NOT_OF_RESPONSES},
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


class ResponseFields(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="response"):
    """The fields of a request that its answer repeats."""

    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    top_logprobs: int
    top_p: float
    user: str | None

    @classmethod
    def of(cls, request: ResponsesRequest, params: SamplingParams) -> ResponseFields:
        return cls(
            request.instructions,
            request.max_output_tokens,
            request.metadata or {},
            request.parallel_tool_calls is not False,
            params.temperature,
            request.text or {"format": {"type": "text"}},
            request.tool_choice or "auto",
            request.top_logprobs or 0,
            params.top_p,
            request.user,
        )


class ResponseWriter:
    """Writes the objects of one answer. `id` and `item_id`: of the response and of its message."""

    def __init__(
        self,
        fields: ResponseFields,
        tokenizer: Tokenizer | None,
        *,
        id: str,
        item_id: str,
        model_name: str,
        created_at: int,
    ) -> None:
        self.id = id
        self.item_id = item_id
        self._fields = fields
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._created_at = created_at

    def response(
        self, status: str, output: list[dict[str, Any]], usage: Usage | None = None, *, error: str | None = None
    ) -> dict[str, Any]:
        """`error`: the message of an error."""
        fields = self._fields
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "background": False,
            "error": None if error is None else {"code": "server_error", "message": error},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata,
            "model": self._model_name,
            "output": output,
            "parallel_tool_calls": fields.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": fields.temperature,
            "text": fields.text,
            "tool_choice": fields.tool_choice,
            "tools": [],
            "top_logprobs": fields.top_logprobs,
            "top_p": fields.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": fields.user,
        }

    def message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def part(self, text: str, logprobs: Sequence[TokenLogprobs] | None) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs(logprobs)}

    def logprobs(self, entries: Sequence[TokenLogprobs] | None) -> list[dict[str, Any]]:
        return [] if entries is None else chat_entries(entries, self._tokenizer)

    def finished(
        self, text: str, logprobs: Sequence[TokenLogprobs] | None, finish_reason: str | None, usage: Usage
    ) -> dict[str, Any]:
        """The response to a request that has ended."""
        status = status_of(finish_reason)
        return self.response(status, [self.message(status, [self.part(text, logprobs)])], usage)


def status_of(finish_reason: str | None) -> str:
    return "completed" if finish_reason == "stop" else "incomplete"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
        "output_tokens": usage.num_generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.num_prompt + usage.num_generated,
    }
