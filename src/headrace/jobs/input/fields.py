"""The parameters that a line may carry: those that become sampling, those that change nothing, those refused.

Nothing is ignored in silence: a parameter that would change the answer and that we do not have is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from headrace.engine.response_format import read_response_format
from headrace.errors import RequestError, nearest
from headrace.types import SamplingParams

MAX_N = 128
UNTIL_CONTEXT_ENDS = None

MAX_REMEMBERED = 1024

_ALIASES = ("max_completion_tokens", "response_format", "top_logprobs")
_BOOLEANS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")

# Left out: `detokenize`, as a line's answer is text, and `prompt_logprobs`, which no answer has a place for.
SAMPLING_FIELDS = frozenset(
    {field.name for field in dataclasses.fields(SamplingParams)} - {"detokenize", "prompt_logprobs"} | set(_ALIASES)
)

# Accepted in an OpenAI body and without effect: they name, label or account for the request.
LABELS = frozenset(
    {
        "metadata",
        "model",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# Not supported: refused with any value but null and these, which ask for nothing.
UNSUPPORTED_SAMPLING: dict[str, tuple[object, ...]] = {
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "stream": (False,),
    "tool_choice": ("none", "auto"),
    "use_beam_search": (False,),
}
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    **UNSUPPORTED_SAMPLING,
    "add_special_tokens": (),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "priority": (0,),
    "reasoning_effort": ("none",),
    "stream_options": (),
    "suffix": ("",),
    "tools": ([],),
    "top_a": (0,),
    "truncate_prompt_tokens": (),
    "verbosity": (),
    "web_search_options": (),
}
_STRUCTURE = "write it as structured_outputs, with json, regex, choice or grammar"
_REASONS = {
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex"), _STRUCTURE),
    "stream": "a batch job writes whole answers",
    "priority": "a batch job chooses its own order",
}


def refuse_unsupported(given: Mapping[str, Any], unsupported: Mapping[str, tuple[object, ...]]) -> None:
    if unsupported.keys().isdisjoint(given):
        return
    for name, value in given.items():
        neutral = unsupported.get(name)
        if neutral is None or value is None or value in neutral:
            continue
        reason = f" ({_REASONS[name]})" if name in _REASONS else ""
        way_out = f"leave it out or set it to {neutral[0]!r}" if neutral else "leave it out"
        raise RequestError(
            f"{name}={_shown(value)} is not supported{reason}; {way_out}", param=name, code="unsupported"
        )


def refuse_unknown(given: Collection[str], known: frozenset[str]) -> None:
    if known.issuperset(given):
        return
    for name in given:
        if name not in known:
            raise RequestError(
                f"unknown parameter {name!r}{nearest(name, known)}", param=name, code="unknown_parameter"
            )


class ParamsReader:
    """A line's own values over the job's defaults. Most lines of a file have the same few values, and what was checked
    once is not checked or made again."""

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        self._defaults = defaults
        self._checked: dict[object, SamplingParams] = {}

    def read(self, given: Mapping[str, Any], names: tuple[str, ...] | None = None) -> SamplingParams:
        """`names` are those of them that are sampling, where somebody knows. Without a seed each line draws its own:
        only where nothing is drawn there is one for all."""
        if names is None:
            names = sampling_names(given)
        values = [given[name] for name in names]
        # Equal only for equal values of equal kinds: 1, 1.0 and true are three things.
        key = (names, *values, *map(type, values))
        try:
            params = self._checked.get(key)
        except TypeError:  # one is a list
            return self._check(given, names)
        if params is None:
            params = self._check(given, names)
            if given.get("seed") is None and len(self._checked) < MAX_REMEMBERED:
                self._checked[key] = params
        return params

    def _check(self, given: Mapping[str, Any], names: tuple[str, ...]) -> SamplingParams:
        own = {name: given[name] for name in names if given[name] is not None}
        _check_kinds(own)
        _join_max_tokens(own)
        _join_logprobs(own)
        _join_structure(own)
        params = SamplingParams(**{**self._defaults, **own})
        return dataclasses.replace(params, seed=0) if params.is_greedy and params.seed is None else params


def sampling_names(given: Iterable[str]) -> tuple[str, ...]:
    return tuple([name for name in given if name in SAMPLING_FIELDS])


def sampling_params(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """The same for one request."""
    return ParamsReader(defaults).read(given)


def with_overrides(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A line's own parameters, replaced; the two names of the longest answer are one parameter."""
    names = {"max_tokens", "max_completion_tokens"}
    dropped = names if names & overrides.keys() else set()
    return {**{name: value for name, value in fields.items() if name not in dropped}, **overrides}


def _check_kinds(own: Mapping[str, Any]) -> None:
    """What `SamplingParams` takes as it comes. It checks the numbers itself."""
    for name in _BOOLEANS:
        if name in own and not isinstance(own[name], bool):
            raise RequestError(f"{name} must be true or false, got {own[name]!r}", param=name)
    if not isinstance(own.get("stop", ""), (str, list)):
        raise RequestError(f"stop must be text or a list of it, got {own['stop']!r}", param="stop")
    if not isinstance(own.get("stop_token_ids", []), list):
        raise RequestError(f"stop_token_ids must be a list, got {own['stop_token_ids']!r}", param="stop_token_ids")
    for name in ("n", "best_of"):
        num_answers = own.get(name, 1)
        if isinstance(num_answers, int) and num_answers > MAX_N:
            raise RequestError(f"{name} must be between 1 and {MAX_N}, got {num_answers}", param=name)


def _join_max_tokens(own: dict[str, Any]) -> None:
    newer = own.pop("max_completion_tokens", None)
    if newer is None:
        return
    if own.get("max_tokens", newer) != newer:
        raise RequestError(
            f"max_completion_tokens={newer!r} and max_tokens={own['max_tokens']!r} mean the same; give one",
            param="max_completion_tokens",
        )
    own["max_tokens"] = newer


def _join_logprobs(own: dict[str, Any]) -> None:
    """Chat says `logprobs: true` and `top_logprobs: 5`, completions say `logprobs: 5`; both are read everywhere."""
    most_likely = own.pop("top_logprobs", None)
    wanted = own.pop("logprobs", False)
    if wanted is True:
        own["logprobs"] = most_likely or 0
    elif most_likely is not None:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    elif wanted is not False:
        own["logprobs"] = wanted


def _join_structure(own: dict[str, Any]) -> None:
    """OpenAI says `response_format`, vLLM `structured_outputs`."""
    asked = read_response_format(own.pop("response_format", None))
    if asked is None:
        return
    if "structured_outputs" in own:
        raise RequestError("response_format and structured_outputs are both given; give one", param="response_format")
    own["structured_outputs"] = asked


def _shown(value: object) -> str:
    """A value in an error message; a list of tools may be long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
