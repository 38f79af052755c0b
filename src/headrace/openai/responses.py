"""The requests and answers of /v1/responses: OpenAI's Responses API, without what is stored between requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.openai.answer_format import AnswerFormat
from headrace.openai.errors import INVALID_TYPE, UNKNOWN, bad_request, not_supported
from headrace.openai.fields import note_ignored
from headrace.openai.logprobs import chat_entries, entries_of_text
from headrace.openai.prompts import template_variables
from headrace.openai.response_output import MakeId, Output, OutputItem, whole_deltas
from headrace.openai.response_tools import called, chat_request
from headrace.openai.sampling import (
    NO_DEFAULTS,
    AnswerLimit,
    Limits,
    check_label,
    check_logprobs,
    sampling_params,
)
from headrace.openai.schema.chat import ChatRequest
from headrace.openai.schema.common import SamplingFields
from headrace.openai.schema.responses import ResponsesRequest
from headrace.openai.usage import Usage
from headrace.text import Tokenizer
from headrace.types import SamplingParams, TokenLogprobs

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
RESPONSE_ID_PREFIX = "resp_"
INCLUDABLE = (LOGPROBS, ENCRYPTED_REASONING)
TRUNCATIONS = (None, "disabled", "auto")
_COPIED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "stop", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
    *("structured_outputs", "priority", "cache_salt", "request_id", "stream"),
)
_NOT_OF_RESPONSES = ("n", "best_of", "logprobs", "prompt_logprobs")  # a response has one message


def responses_limit(request: ResponsesRequest, default: int | None = None) -> AnswerLimit:
    given = request.max_output_tokens
    return AnswerLimit(default if given is None else given, "max_output_tokens")


def responses_params(
    request: ResponsesRequest,
    limits: Limits,
    limit: AnswerLimit,
    *,
    defaults: Mapping[str, Any] = NO_DEFAULTS,
    **more: Any,
) -> SamplingParams:
    """`defaults`: for fields that the request does not give. `more`: values that replace the request's."""
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
        **more,
    )


def _check(request: ResponsesRequest, limits: Limits) -> None:
    for name in request.include or ():
        if name not in INCLUDABLE:
            raise not_supported("include", f"include cannot have {name!r}, only {' and '.join(INCLUDABLE)}")
    if request.truncation not in TRUNCATIONS:
        raise bad_request(f"truncation must be 'auto' or 'disabled', got {request.truncation!r}", "truncation")
    if request.background and request.store is False:
        raise bad_request("background can only be used when `store` is true; leave out store", "store")
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options is for streams: set stream to true", "stream_options")
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise not_supported("stream_options.include_obfuscation", "include_obfuscation is not supported; leave it out")
    check_label("request_id", request.request_id)
    check_logprobs("top_logprobs", request.top_logprobs, limits)


def response_tools(request: ResponsesRequest) -> ChatRequest:
    """The tools as a chat request has them, for `read_answer_use`."""
    return chat_request(request, _response_format(request.text))


def response_variables(request: ResponsesRequest) -> dict[str, Any]:
    """The variables of the chat template that a request sets. How reasoning is summarized has no effect."""
    effort = (request.reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise bad_request("reasoning.effort must be text", "reasoning.effort", INVALID_TYPE)
    return template_variables(request.chat_template_kwargs, effort)


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
    """The fields of a request that its answer repeats, and how the answer is read."""

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
    tools: list[dict[str, Any]]
    reasoning: dict[str, Any] | None
    truncation: str
    previous_response_id: str | None
    background: bool
    is_stored: bool = False
    packs_reasoning: bool = False
    format: AnswerFormat | None = None  # None: the answer is text

    @classmethod
    def of(
        cls,
        request: ResponsesRequest,
        params: SamplingParams,
        *,
        format: AnswerFormat | None = None,
        is_stored: bool = False,
    ) -> ResponseFields:
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
            request.tools or [],
            request.reasoning,
            request.truncation or "disabled",
            request.previous_response_id,
            bool(request.background),
            is_stored,
            ENCRYPTED_REASONING in (request.include or ()),
            format,
        )

    def output(self, text: str, make_id: MakeId) -> Output:
        """The items of a whole answer."""
        output = Output.of(whole_deltas(self.format, text), make_id)
        output.close()
        return output


@dataclass(frozen=True, slots=True)
class RawMessage:
    """A text with its tokens, as vLLM shows them for `enable_response_messages`."""

    text: str
    token_ids: Sequence[int]

    def to_json(self) -> dict[str, Any]:
        return {"type": "raw_message_tokens", "message": self.text, "tokens": list(self.token_ids)}


class ResponseWriter:
    """Writes the objects of one answer."""

    def __init__(
        self,
        fields: ResponseFields,
        tokenizer: Tokenizer | None,
        *,
        id: str,
        make_id: MakeId,
        model_name: str,
        created_at: int,
        prompt: RawMessage | None = None,
    ) -> None:
        """`make_id`: makes the ids of items. `prompt`: shown with the answer, as the model saw them."""
        self.id = id
        self.fields = fields
        self.make_id = make_id
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._created_at = created_at
        self._prompt = prompt

    def response(
        self,
        status: str,
        output: list[dict[str, Any]],
        usage: dict[str, Any] | None = None,
        *,
        error: str | None = None,
    ) -> dict[str, Any]:
        """`usage`: from `usage`; `error`: the message of an error."""
        fields = self.fields
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "background": fields.background,
            "error": None if error is None else {"code": "server_error", "message": error},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata,
            "model": self._model_name,
            "output": output,
            "parallel_tool_calls": fields.parallel_tool_calls,
            "previous_response_id": fields.previous_response_id,
            "reasoning": {"effort": None, "summary": None, **(fields.reasoning or {})},
            "store": fields.is_stored,
            "temperature": fields.temperature,
            "text": fields.text,
            "tool_choice": fields.tool_choice,
            "tools": fields.tools,
            "top_logprobs": fields.top_logprobs,
            "top_p": fields.top_p,
            "truncation": fields.truncation,
            "usage": usage,
            "user": fields.user,
        }

    def raw_messages(self, text: str, token_ids: Sequence[int]) -> dict[str, Any]:
        """The members of a response that show prompt and answer, if the request asked for them."""
        if self._prompt is None:
            return {}
        answer = RawMessage(text, token_ids)
        return {"input_messages": [self._prompt.to_json()], "output_messages": [answer.to_json()]}

    def item(self, item: OutputItem, status: str, logprobs: Sequence[TokenLogprobs] | None = None) -> dict[str, Any]:
        fields = self.fields
        shown = item.to_json(status, logprobs=self.logprobs(logprobs), packs_reasoning=fields.packs_reasoning)
        return shown | called(item.name, fields.tools) if item.kind == "function_call" else shown

    def items(
        self, output: Output, status: str, logprobs: Sequence[TokenLogprobs] | None = None
    ) -> list[dict[str, Any]]:
        """All items. `status` is that of the last one: those before it are complete. Log-probabilities are those of
        all tokens of the answer; a text at its end has its own of them."""
        *before, last = output.items
        of_text = logprobs
        if before and logprobs is not None:
            of_text = entries_of_text(logprobs, last.text, self._tokenizer)
        return [*(self.item(item, "completed") for item in before), self.item(last, status, of_text)]

    def logprobs(self, entries: Sequence[TokenLogprobs] | None) -> list[dict[str, Any]]:
        return [] if entries is None else chat_entries(entries, self._tokenizer)

    def logprobs_of(self, text: str, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Those of a text at the end of what the tokens spell."""
        return self.logprobs(entries_of_text(entries, text, self._tokenizer))

    def usage(self, usage: Usage, output: Output) -> dict[str, Any]:
        reasoning = output.reasoning
        num_reasoning = 0
        if reasoning and self._tokenizer is not None:
            num_reasoning = min(len(self._tokenizer.encode(reasoning, False)), usage.num_generated)
        return {
            "input_tokens": usage.num_prompt,
            "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
            "output_tokens": usage.num_generated,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": usage.num_prompt + usage.num_generated,
        }

    def finished(
        self, text: str, logprobs: Sequence[TokenLogprobs] | None, finish_reason: str | None, usage: Usage
    ) -> dict[str, Any]:
        """The response to a request that has ended."""
        status, output = status_of(finish_reason), self.fields.output(text, self.make_id)
        return self.response(status, self.items(output, status, logprobs), self.usage(usage, output))


def status_of(finish_reason: str | None) -> str:
    return "completed" if finish_reason == "stop" else "incomplete"
