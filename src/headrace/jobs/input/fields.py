"""The sampling parameters of a line. Equal values of many lines are checked once.

OpenAI lines are read as the server reads a body (`headrace.openai`). A plain line has the same sampling fields beside
its prompt; `logprobs` may have the form of either endpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import field

from headrace.openai.body import convert
from headrace.openai.choices import encode
from headrace.openai.errors import bad_request
from headrace.openai.fields import BATCH_REASONS, NOT_IN_BATCH, REASONS, UNSUPPORTED, refusal, refuse_in_batch
from headrace.openai.responses import responses_limit, responses_params
from headrace.openai.sampling import (
    SAME_FIELDS,
    Limits,
    chat_limit,
    chat_params,
    check_logprobs,
    completion_limit,
    completion_params,
)
from headrace.openai.schema.chat import ChatRequest
from headrace.openai.schema.completions import CompletionRequest
from headrace.openai.schema.responses import UNSUPPORTED_IN_RESPONSES, ResponsesRequest
from headrace.types import MAX_SEED, MIN_SEED, SamplingParams

UNTIL_CONTEXT_ENDS = None
MAX_REMEMBERED = 1024  # sets of values
MAX_KEY_BYTES = 4096  # of a set with lists or objects

_LIMITS = Limits()
_PLAIN_LIMITS = Limits(max_stops=None)

# Parameters whose names are as likely those of data. A plain line carries them to the output.
_DATA_NAMES = frozenset(
    {
        "audio",
        "documents",
        "modalities",
        "moderation",
        "prediction",
        "prompt_cache_options",
        "service_tier",
        "store",
        "verbosity",
    }
)

# A plain line refuses these, as it would otherwise carry them to the output as data. `add_special_tokens` depends on
# the line: a chat template writes special tokens itself.
UNSUPPORTED_SAMPLING: dict[str, tuple[Any, ...]] = {
    **{name: neutral for name, neutral in UNSUPPORTED.items() if name not in _DATA_NAMES},
    **NOT_IN_BATCH,
    "add_special_tokens": (),
    "length_penalty": (1,),
    "parallel_tool_calls": (True, False),
    "stream_options": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
_PLAIN_REASONS = {
    **REASONS,
    **BATCH_REASONS,
    **dict.fromkeys(
        ("tool_choice", "tools"), "a plain line is answered with text; lines of OpenAI's batch format have it"
    ),
}

# The sampling parameters of a line. `prompt_logprobs` is left out: no output line has a place for it.
SAMPLING_FIELDS = frozenset(
    (
        *(name for name in SAME_FIELDS if name not in NOT_IN_BATCH),
        *("max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "response_format", "structured_outputs"),
    )
)


class PlainSampling(ChatRequest, kw_only=True, forbid_unknown_fields=True):
    """The sampling fields of a plain line, whose prompt or messages are read elsewhere."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    logprobs: bool | int | None = None  # type: ignore[assignment]  # chat has a boolean, completions a number


def refuse_unsupported(given: Mapping[str, Any]) -> None:
    for name, neutral in UNSUPPORTED_SAMPLING.items():
        if name == "add_special_tokens":
            neutral = (given.get("messages") is None,)
        if name in given and (error := refusal(name, given[name], neutral, _PLAIN_REASONS)) is not None:
            raise error


Read = Callable[[dict[str, Any], Mapping[str, Any]], SamplingParams]  # given fields, defaults


def read_chat(given: dict[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """The sampling of a body for /v1/chat/completions, which is checked in full."""
    request = convert(ChatRequest, given)
    refuse_in_batch(request)
    return chat_params(request, _LIMITS, chat_limit(request, defaults["max_tokens"]), defaults=defaults)


def read_completion(given: dict[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """The same for /v1/completions."""
    request = convert(CompletionRequest, given)
    refuse_in_batch(request)
    return completion_params(request, _LIMITS, completion_limit(request, defaults["max_tokens"]), defaults=defaults)


def read_response(given: dict[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """The same for /v1/responses."""
    request = as_response(given)
    refuse_in_batch(request)
    return responses_params(request, _LIMITS, responses_limit(request, defaults["max_tokens"]), defaults=defaults)


def as_response(given: dict[str, Any]) -> ResponsesRequest:
    return convert(ResponsesRequest, given, unsupported=UNSUPPORTED_IN_RESPONSES)


def read_plain(given: dict[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """Reads only the sampling fields of a line."""
    request = convert(PlainSampling, {name: value for name, value in given.items() if name in SAMPLING_FIELDS})
    limit = chat_limit(request, defaults["max_tokens"])
    if request.logprobs is None or isinstance(request.logprobs, bool):
        return chat_params(request, _PLAIN_LIMITS, limit, defaults=defaults)
    if request.top_logprobs is not None:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    check_logprobs("logprobs", request.logprobs, _PLAIN_LIMITS)
    return chat_params(request, _PLAIN_LIMITS, limit, defaults=defaults, logprobs=request.logprobs)


class ParamsReader:
    """Reads the values of lines over the job's defaults. Most lines of a file have one of a few sets of values, so the
    parameters of each set are made once."""

    def __init__(self, read: Read, defaults: Mapping[str, Any]) -> None:
        self._read = read
        self._defaults = defaults
        self._known: dict[object, SamplingParams] = {}

    def read(self, given: dict[str, Any], names: tuple[str, ...]) -> SamplingParams:
        """`names`: the fields of `given` that the parameters depend on. Without a seed, each line samples with its own;
        greedy parameters get a fixed one, so that lines share them."""
        seed = given.get("seed")
        if seed is None:
            return self._read_shared(given, names)
        if type(seed) is not int or not MIN_SEED <= seed <= MAX_SEED:
            return self._make(given)  # which refuses it
        without_seed = {name: value for name, value in given.items() if name != "seed"}
        return self._read_shared(without_seed, tuple([name for name in names if name != "seed"])).with_seed(seed)

    def _read_shared(self, given: dict[str, Any], names: tuple[str, ...]) -> SamplingParams:
        values = [given[name] for name in names]
        key: object = (names, *values, *map(type, values))  # 1, 1.0 and true are equal: their types tell them apart
        try:
            params = self._known.get(key)
        except TypeError:  # a list or an object
            encoded = encode(values)
            if len(encoded) > MAX_KEY_BYTES:
                return self._make(given)
            key = (names, encoded)
            params = self._known.get(key)
        if params is None:
            params = self._make(given)
            if len(self._known) < MAX_REMEMBERED:
                self._known[key] = params
        return params

    def _make(self, given: dict[str, Any]) -> SamplingParams:
        params = self._read(given, self._defaults)
        return dataclasses.replace(params, seed=0) if params.is_greedy and params.seed is None else params


def sampling_names(given: Iterable[str]) -> tuple[str, ...]:
    return tuple([name for name in given if name in SAMPLING_FIELDS])


def sampling_params(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters of one set of fields."""
    return read_plain(dict(given), {"max_tokens": UNTIL_CONTEXT_ENDS, **defaults})


def with_overrides(
    fields: Mapping[str, Any], overrides: Mapping[str, Any], *, limit_name: str | None = None
) -> dict[str, Any]:
    """The fields of a line with some replaced. The names of the longest answer are one parameter; `limit_name`: the
    only one of them that the line can have."""
    names = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
    dropped = names if names & overrides.keys() else set()
    if limit_name is not None:
        overrides = {limit_name if name in names else name: value for name, value in overrides.items()}
    return {**{name: value for name, value in fields.items() if name not in dropped}, **overrides}
