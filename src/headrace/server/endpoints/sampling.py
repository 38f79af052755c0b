"""From the fields of a request to the engine's sampling parameters, within the server's limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.engine.beam_search import BeamSearchParams
from headrace.errors import RequestError
from headrace.server.endpoints.schema.common import SamplingFields
from headrace.server.http.errors import ApiError, bad_request
from headrace.server.options import ServerOptions
from headrace.types import SamplingParams

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_ID_CHARACTERS = 256

_DIRECT = (
    "n",
    "best_of",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "skip_special_tokens",
)
_NOT_WITH_BEAMS = (
    *("best_of", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words", "seed", "stop", "stop_token_ids", "min_tokens", "echo"),
    *("prompt_logprobs", "response_format", "structured_outputs", "tools"),
)


@dataclass(frozen=True, slots=True)
class AnswerLimit:
    """How long an answer may become, and under which name the client said so."""

    num_tokens: int | None  # None: up to the end of the context
    param: str = "max_tokens"
    is_given: bool = True


def sampling_params(request: SamplingFields, options: ServerOptions, limit: AnswerLimit, **more: Any) -> SamplingParams:
    """`more`: what the endpoint has named in its own way."""
    _check_bounds(request, options)
    given = {name: value for name in _DIRECT if (value := getattr(request, name)) is not None}
    try:
        return SamplingParams(**given | {"max_tokens": limit.num_tokens} | more)
    except RequestError as error:
        raise bad_request(_renamed(str(error), error.param, limit.param), _rename(error.param, limit.param)) from None


def beam_params(request: SamplingFields, limit: AnswerLimit, max_model_len: int) -> BeamSearchParams:
    for name in _NOT_WITH_BEAMS:
        if getattr(request, name, None) not in (None, False, 0, [], ""):
            raise bad_request(f"{name} cannot be used with use_beam_search", name, "unsupported_parameter")
    if request.stream:
        raise bad_request("a beam search cannot be streamed; its beams are known at the end", "stream")
    try:
        return BeamSearchParams(
            beam_width=1 if request.n is None else request.n,
            max_tokens=max_model_len if limit.num_tokens is None else limit.num_tokens,
            ignore_eos=bool(request.ignore_eos),
            temperature=0.0 if request.temperature is None else request.temperature,
            length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        )
    except RequestError as error:
        names = {"beam_width": "n", "max_tokens": limit.param}
        param = names.get(error.param or "", error.param)
        raise bad_request(str(error).replace("beam_width", "n (the beam width)", 1), param) from None


def _check_bounds(request: SamplingFields, options: ServerOptions) -> None:
    for name in ("n", "best_of"):
        value = getattr(request, name)
        if value is not None and not 1 <= value <= options.max_n:
            raise bad_request(f"{name} must be between 1 and {options.max_n}, got {value}", name)
    check_logprobs("prompt_logprobs", request.prompt_logprobs, options)
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
        raise bad_request(f"stop can be at most {MAX_STOPS} texts of {MAX_STOP_CHARACTERS:,} characters", "stop")
    for name in ("request_id", "cache_salt"):
        check_label(name, getattr(request, name))
    if request.length_penalty not in (None, 1) and not request.use_beam_search:
        raise bad_request("length_penalty is for use_beam_search", "length_penalty")
    if request.stream and request.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs cannot be streamed", "prompt_logprobs")
    if request.stream and (request.best_of or 0) > (request.n or 1):
        raise bad_request("best_of cannot be streamed: which answers are the best is known at the end", "best_of")
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options is for streams: set stream to true", "stream_options")
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise bad_request("include_obfuscation is not supported; leave it out", "stream_options.include_obfuscation")


def check_label(name: str, value: str | None) -> None:
    if value is not None and not (0 < len(value) <= MAX_ID_CHARACTERS and value.isprintable()):
        raise bad_request(f"{name} must be 1 to {MAX_ID_CHARACTERS} printable characters", name)


def check_logprobs(name: str, value: int | None, options: ServerOptions) -> None:
    if value is not None and not 0 <= value <= options.max_logprobs:
        raise bad_request(f"{name} must be between 0 and {options.max_logprobs}, got {value}", name)


def check_context(num_prompt: int, limit: AnswerLimit, max_model_len: int, *, prompt_param: str) -> None:
    """Refuse at once what cannot be answered in full."""
    if num_prompt == 0:
        raise bad_request("the prompt has no tokens", prompt_param, "empty_prompt")
    num_answer = limit.num_tokens if limit.is_given and limit.num_tokens is not None else 1
    if num_prompt + max(1, num_answer) <= max_model_len:
        return
    left = max_model_len - num_prompt
    if left < 1:
        message = f"the prompt has {num_prompt:,} tokens, but the context holds {max_model_len:,}, answer included"
        raise ApiError(400, f"{message}; shorten the prompt", param=prompt_param, code="context_length_exceeded")
    raise ApiError(
        400,
        f"the prompt has {num_prompt:,} tokens and {limit.param} is {num_answer:,}, but the context holds "
        f"{max_model_len:,}; lower {limit.param} to {left:,} or shorten the prompt",
        param=limit.param,
        code="context_length_exceeded",
    )


def _rename(param: str | None, max_tokens: str) -> str | None:
    return max_tokens if param == "max_tokens" else param


def _renamed(message: str, param: str | None, max_tokens: str) -> str:
    return message.replace("max_tokens", max_tokens, 1) if param == "max_tokens" else message
