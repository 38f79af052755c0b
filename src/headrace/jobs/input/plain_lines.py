"""Plain lines: {"prompt": ...} or {"messages": [...]} with sampling fields. Other fields are copied to the output."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from headrace.errors import RequestError
from headrace.jobs.input.fields import SAMPLING_FIELDS, UNSUPPORTED_SAMPLING, refuse_unsupported
from headrace.jobs.input.line_output import LineAnswer, LineOutput
from headrace.jobs.input.reply import JobFacts, encode, error_body, usage
from headrace.openai.errors import UNSUPPORTED
from headrace.openai.logprobs import chat_entries
from headrace.types import FinishReason

DEFAULT_PROMPT_TOKENS = 256  # answer limit for a bare prompt, whose answer may never end by itself

_OWN_FIELDS = frozenset({"prompt", "messages", "chat_template_kwargs", "reasoning_effort", "cache_salt"})
_WRITTEN = frozenset({"index", "line", "text", "outputs", "finish_reason", "logprobs", "usage", "error", "input"})
_NOT_CARRIED = _OWN_FIELDS | SAMPLING_FIELDS | UNSUPPORTED_SAMPLING.keys()

PARAMETERS = _NOT_CARRIED - {"prompt"}  # fields that are JSON in a table whose cells are text


def is_plain(line: Mapping[str, Any]) -> bool:
    return "prompt" in line or "messages" in line


def check_plain(line: Mapping[str, Any]) -> None:
    refuse_unsupported(line)
    if "sampling_params" in line:
        raise RequestError(
            "sampling_params is not read: write its fields beside the prompt",
            param="sampling_params",
            code=UNSUPPORTED,
        )


def carried_fields(line: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that are copied to the output; one whose name the output line uses itself moves under 'input'."""
    return _without_clashes({name: value for name, value in line.items() if name not in _NOT_CARRIED})


def carried_columns(row: dict[str, Any], messages_column: str | None) -> dict[str, Any]:
    """The same for a line with a template, in which no name is a parameter: all columns but the messages."""
    return _without_clashes({name: value for name, value in row.items() if name != messages_column})


def idle_columns(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Warnings about columns that would be parameters in a line without a template."""
    if SAMPLING_FIELDS.isdisjoint(row):
        return ()
    return tuple(f"column {name!r} is data and sets nothing" for name in row if name in SAMPLING_FIELDS)


def _without_clashes(fields: dict[str, Any]) -> dict[str, Any]:
    if _WRITTEN.isdisjoint(fields):
        return fields
    clashes = {name: fields.pop(name) for name in [*fields] if name in _WRITTEN}
    return {**fields, "input": clashes}


def misspelt_fields(carried: Mapping[str, Any]) -> list[str]:
    """Warnings about copied fields that look like a misspelt parameter."""
    return [note for name in carried if (note := _misspelt(name))] if carried else []


@lru_cache(1024)
def _misspelt(name: str) -> str | None:
    plain_name = name.lower().replace("-", "_")
    matches = difflib.get_close_matches(plain_name, SAMPLING_FIELDS, n=1, cutoff=0.85)
    if not matches:
        return None
    return f"field {name!r} sets nothing and is carried to the output, did you mean {matches[0]!r}?"


def as_members(carried: Mapping[str, Any]) -> bytes:
    """The members of a JSON object, each followed by a comma: the form in which they are kept and sent."""
    return encode(carried)[1:-1] + b"," if carried else b""


class PlainReply(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=1):
    index: int
    carried: bytes = b""  # see `as_members`

    def answer(self, output: LineOutput, facts: JobFacts) -> bytes:
        answers = output.answers
        if len(answers) == 1:
            body = encode(_answer(answers[0], facts))[1:-1]
        else:
            body = b'"outputs":' + encode([_answer(answer, facts) for answer in answers])
        return b'{"index":%d,%b%b,"usage":%b}' % (self.index, self.carried, body, usage(output))

    def error(self, error: RequestError, facts: JobFacts) -> bytes:
        body = encode(error_body(error, self.index))
        return b'{"index":%d,"line":%d,%b"error":%b}' % (self.index, self.index + 1, self.carried, body)


class _Answer(msgspec.Struct, gc=False):
    text: str
    finish_reason: FinishReason | None
    logprobs: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


def _answer(answer: LineAnswer, facts: JobFacts) -> _Answer:
    if answer.logprobs is None:
        return _Answer(answer.text, answer.finish_reason)
    return _Answer(answer.text, answer.finish_reason, chat_entries(answer.logprobs, facts.tokenizer))
