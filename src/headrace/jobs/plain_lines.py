"""Plain lines: {"prompt": ...} or {"messages": [...]}, sampling beside it, every other field carried to the output."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from headrace.errors import RequestError
from headrace.jobs.fields import SAMPLING_FIELDS, UNSUPPORTED_SAMPLING, refuse_unsupported
from headrace.jobs.logprobs import chat_entries
from headrace.jobs.reply import JobFacts, error_body, usage
from headrace.types import CompletionOutput, RequestOutput

DEFAULT_PROMPT_TOKENS = 256  # for a bare prompt, which need not come to an end by itself

_OWN_FIELDS = frozenset({"prompt", "messages", "chat_template_kwargs"})
_WRITTEN = frozenset({"index", "line", "text", "outputs", "finish_reason", "logprobs", "usage", "error", "input"})
_NOT_CARRIED = _OWN_FIELDS | SAMPLING_FIELDS | UNSUPPORTED_SAMPLING.keys()


def is_plain(line: Mapping[str, Any]) -> bool:
    return "prompt" in line or "messages" in line


def check_plain(line: Mapping[str, Any]) -> None:
    refuse_unsupported(line, UNSUPPORTED_SAMPLING)
    if "sampling_params" in line:
        raise RequestError(
            "sampling_params is not read: write its fields beside the prompt",
            param="sampling_params",
            code="unsupported",
        )


def carried_fields(line: Mapping[str, Any]) -> dict[str, Any]:
    """What goes to the output unchanged; a name that the answer needs itself moves under 'input'."""
    return _without_clashes({name: value for name, value in line.items() if name not in _NOT_CARRIED})


def carried_columns(row: dict[str, Any], messages_column: str | None) -> dict[str, Any]:
    """The same for a row of data, in which no name is a parameter: all but the messages."""
    return _without_clashes({name: value for name, value in row.items() if name != messages_column})


def idle_columns(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Notes on columns that would be a parameter in a line without a template."""
    if SAMPLING_FIELDS.isdisjoint(row):
        return ()
    return tuple(f"column {name!r} is data and sets nothing" for name in row if name in SAMPLING_FIELDS)


def _without_clashes(fields: dict[str, Any]) -> dict[str, Any]:
    if _WRITTEN.isdisjoint(fields):
        return fields
    clashes = {name: fields.pop(name) for name in _WRITTEN if name in fields}
    return {**fields, "input": clashes}


def misspelt_fields(carried: Mapping[str, Any]) -> list[str]:
    """Notes on carried fields that look like a parameter."""
    return [note for name in carried if (note := _misspelt(name))] if carried else []


@lru_cache(1024)
def _misspelt(name: str) -> str | None:
    plain_name = name.lower().replace("-", "_")
    matches = difflib.get_close_matches(plain_name, SAMPLING_FIELDS, n=1, cutoff=0.85)
    if not matches:
        return None
    return f"field {name!r} sets nothing and is carried to the output, did you mean {matches[0]!r}?"


class PlainReply(msgspec.Struct, frozen=True, gc=False):
    index: int
    carried: Mapping[str, Any]

    def answer(self, output: RequestOutput, facts: JobFacts) -> dict[str, Any]:
        answers = [_answer(answer, facts) for answer in output.outputs]
        body = answers[0] if len(answers) == 1 else {"outputs": answers}
        return {"index": self.index, **self.carried, **body, "usage": usage(output)}

    def error(self, error: RequestError, facts: JobFacts) -> dict[str, Any]:
        return {
            "index": self.index,
            "line": self.index + 1,
            **self.carried,
            "error": error_body(error, self.index),
        }


def _answer(answer: CompletionOutput, facts: JobFacts) -> dict[str, Any]:
    body: dict[str, Any] = {"text": answer.text, "finish_reason": answer.finish_reason}
    if answer.logprobs is not None:
        body["logprobs"] = chat_entries(answer.logprobs, facts.tokenizer)
    return body
