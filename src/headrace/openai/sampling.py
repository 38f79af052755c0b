"""Builds `SamplingParams` from the fields of a request, within the API's bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from headrace.errors import RequestError
from headrace.openai.errors import bad_request
from headrace.openai.response_format import structured_outputs
from headrace.openai.schema.chat import ChatRequest
from headrace.openai.schema.common import FormFields, SamplingFields
from headrace.openai.schema.completions import CompletionRequest
from headrace.sched.limits import check_prompt_len, context_error
from headrace.types import ALL_LOGPROBS, MAX_LOGPROBS, SamplingParams

MAX_N = 128  # OpenAI's
MAX_SEQUENCES = 4096  # prompts times answers to each
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_ID_CHARACTERS = 256
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions only

# Fields that a request and `SamplingParams` have under the same name and with the same meaning.
_NAMED_OTHERWISE = ("max_tokens", "logprobs", "structured_outputs")
SAME_FIELDS = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name in SamplingFields.__struct_fields__ and field.name not in _NAMED_OTHERWISE
)
NO_DEFAULTS: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the API that are not bounds of the engine."""

    max_n: int = MAX_N
    max_logprobs: int = MAX_LOGPROBS  # -1: all
    vocab_size: int | None = None  # None: not known, and a request for all is refused
    max_stops: int | None = MAX_STOPS  # and MAX_STOP_CHARACTERS each; None: no bound


@dataclass(frozen=True, slots=True)
class AnswerLimit:
    """The longest answer, and the name under which the client gave it."""

    num_tokens: int | None  # None: up to the end of the context
    param: str = "max_tokens"
    is_given: bool = True


def chat_limit(request: ChatRequest, default: int | None = None) -> AnswerLimit:
    limit = _given_limit(request)
    return AnswerLimit(default, is_given=False) if limit is None else _at_least_one(limit)


def completion_limit(request: CompletionRequest, default: int | None = DEFAULT_COMPLETION_TOKENS) -> AnswerLimit:
    limit = _given_limit(request)
    if limit is None:
        return AnswerLimit(default, is_given=False)
    if limit.num_tokens == 0 and request.echo:
        return limit
    return _at_least_one(limit, "; 0 is for echo, to score a prompt")


def _given_limit(request: FormFields) -> AnswerLimit | None:
    """The limit under one of its two names; None: the request has none."""
    newer, older = request.max_completion_tokens, request.max_tokens
    if newer is not None and older is not None and newer != older:
        raise bad_request(
            f"max_completion_tokens ({newer}) and max_tokens ({older}) mean the same; give one", "max_completion_tokens"
        )
    if newer is not None:
        return AnswerLimit(newer, "max_completion_tokens")
    return None if older is None else AnswerLimit(older)


def _at_least_one(limit: AnswerLimit, hint: str = "") -> AnswerLimit:
    if limit.num_tokens is not None and limit.num_tokens < 1:
        raise bad_request(f"{limit.param} must be at least 1, got {limit.num_tokens}{hint}", limit.param)
    return limit


def chat_params(
    request: ChatRequest,
    limits: Limits,
    limit: AnswerLimit,
    *,
    defaults: Mapping[str, Any] = NO_DEFAULTS,
    **more: Any,
) -> SamplingParams:
    """`defaults`: for fields that the request does not give. `more`: values that replace the request's."""
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    check_tool_choice(request)
    check_logprobs("top_logprobs", request.top_logprobs, limits)
    if request.logprob_token_ids is not None and (request.logprobs is None or request.logprobs is False):
        raise bad_request("logprob_token_ids needs logprobs to be true", "logprob_token_ids")
    if request.logprobs is not None:
        more.setdefault("logprobs", (request.top_logprobs or 0) if request.logprobs else None)
    return sampling_params(request, limits, limit, defaults=defaults, **more)


def check_tool_choice(request: ChatRequest) -> None:
    if not request.tools and request.tool_choice not in (None, "none", "auto"):
        raise bad_request("tool_choice needs tools", "tool_choice")


def completion_params(
    request: CompletionRequest, limits: Limits, limit: AnswerLimit, *, defaults: Mapping[str, Any] = NO_DEFAULTS
) -> SamplingParams:
    check_logprobs("logprobs", request.logprobs, limits)
    if request.logprob_token_ids is not None and (request.logprobs is None or limit.num_tokens == 0):
        raise bad_request("logprob_token_ids needs logprobs, and an answer of at least 1 token", "logprob_token_ids")
    more: dict[str, Any] = {}
    if request.logprobs is not None:
        more["logprobs"] = request.logprobs
        if request.echo:
            asked = (request.logprobs, request.prompt_logprobs or 0)
            more["prompt_logprobs"] = ALL_LOGPROBS if ALL_LOGPROBS in asked else max(asked)
    if limit.num_tokens == 0:  # a prompt that is only scored still has one token sampled, which is not shown
        limit = AnswerLimit(1)
    return sampling_params(request, limits, limit, defaults=defaults, **more)


def check_num_sequences(params: SamplingParams, num_prompts: int) -> None:
    if params.num_sequences * num_prompts > MAX_SEQUENCES:
        raise bad_request(
            f"{num_prompts:,} prompts with {params.num_sequences} answers each are more than {MAX_SEQUENCES:,}", "n"
        )


def sampling_params(
    request: SamplingFields,
    limits: Limits,
    limit: AnswerLimit,
    *,
    defaults: Mapping[str, Any] = NO_DEFAULTS,
    **more: Any,
) -> SamplingParams:
    """`more`: values that the endpoint names in its own way."""
    _check_bounds(request, limits)
    given = {name: value for name in SAME_FIELDS if (value := getattr(request, name)) is not None}
    given["max_tokens"] = limit.num_tokens
    if "structured_outputs" not in more and (form := structured_outputs(request)) is not None:
        given["structured_outputs"] = form
    try:
        return SamplingParams(**{**defaults, **given, **more})
    except RequestError as error:
        if error.param != "max_tokens":
            raise
        raise bad_request(str(error).replace("max_tokens", limit.param, 1), limit.param) from None


def _check_bounds(request: SamplingFields, limits: Limits) -> None:
    for name in ("n", "best_of"):
        value = getattr(request, name)
        if value is not None and not 1 <= value <= limits.max_n:
            raise bad_request(f"{name} must be between 1 and {limits.max_n}, got {value}", name)
    check_logprobs("prompt_logprobs", request.prompt_logprobs, limits)
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if limits.max_stops is not None and (
        len(stops) > limits.max_stops or any(len(stop) > MAX_STOP_CHARACTERS for stop in stops)
    ):
        raise bad_request(f"stop can be at most {limits.max_stops} texts of {MAX_STOP_CHARACTERS:,} characters", "stop")
    for name in ("request_id", "cache_salt"):
        check_label(name, getattr(request, name))
    if request.use_beam_search and request.logprob_token_ids is not None:
        raise bad_request("logprob_token_ids is not supported with use_beam_search", "logprob_token_ids")
    if request.length_penalty not in (None, 1) and not request.use_beam_search:
        raise bad_request("length_penalty is for use_beam_search", "length_penalty")
    if request.stream and request.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs cannot be streamed", "prompt_logprobs")
    if request.stream and (request.best_of or 0) > (request.n or 1):
        raise bad_request("best_of cannot be streamed: the best answers are known at the end", "best_of")
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options is for streams: set stream to true", "stream_options")
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise bad_request("include_obfuscation is not supported; leave it out", "stream_options.include_obfuscation")


def check_label(name: str, value: str | None) -> None:
    if value is not None and not (0 < len(value) <= MAX_ID_CHARACTERS and value.isprintable()):
        raise bad_request(f"{name} must be 1 to {MAX_ID_CHARACTERS} printable characters", name)


def check_logprobs(name: str, value: int | None, limits: Limits) -> None:
    """Refuse more log-probabilities than the server gives. -1 asks for the whole vocabulary, as in vLLM."""
    if value is None or 0 <= value <= limits.max_logprobs:
        return
    if limits.max_logprobs == ALL_LOGPROBS and value >= ALL_LOGPROBS:
        return
    if value == ALL_LOGPROBS and limits.vocab_size is not None and limits.vocab_size <= limits.max_logprobs:
        return
    raise bad_request(f"{name} must be between 0 and {limits.max_logprobs}, got {value}", name)


def check_context(num_prompt: int, limit: AnswerLimit, max_model_len: int, *, prompt_param: str) -> None:
    """Refuse a request whose prompt and longest answer do not fit into the context, before it is queued."""
    check_prompt_len(num_prompt, max_model_len, param=prompt_param)
    num_answer = limit.num_tokens if limit.is_given and limit.num_tokens is not None else 1
    if num_prompt + num_answer > max_model_len:
        raise context_error(
            f"you requested {num_prompt + num_answer} tokens ({num_prompt} in the prompt, {num_answer} in the "
            f"completion). Please reduce the length of the prompt, or {limit.param} to {max_model_len - num_prompt}.",
            max_model_len,
            param=limit.param,
        )
