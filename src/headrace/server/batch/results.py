"""Splits the results of a job into the output file and the error file of its batch, and adds up their tokens."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.jobs.store.record import Record
from headrace.server.batch.records import BatchUsage


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """Of all endpoints: /v1/responses has names of its own."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None
    input_tokens_details: _CachedTokens | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    body: _Body


class _Line(msgspec.Struct):
    response: _Response


_decode = msgspec.json.Decoder(_Line).decode


@dataclass(frozen=True)
class Written:
    num_answers: int
    num_errors: int
    usage: BatchUsage


def write_results(records: Iterable[Record], answers: Path, errors: Path) -> Written:
    """Write and sync both files. The caller renames them: until then they are remains of a crash."""
    num_answers = num_errors = num_input = num_cached = num_output = 0
    with ExitStack() as stack:
        answer_file, error_file = (stack.enter_context(open(path, "wb")) for path in (answers, errors))
        for record in records:
            if record.error is not None:
                error_file.write(record.result + b"\n")
                num_errors += 1
                continue
            answer_file.write(record.result + b"\n")
            num_answers += 1
            usage = _decode(record.result).response.body.usage
            if usage is not None:
                num_input += usage.prompt_tokens + usage.input_tokens
                num_output += usage.completion_tokens + usage.output_tokens
                details = usage.prompt_tokens_details or usage.input_tokens_details
                num_cached += 0 if details is None else details.cached_tokens or 0
        for file in (answer_file, error_file):
            file.flush()
            os.fsync(file.fileno())
    return Written(num_answers, num_errors, BatchUsage(num_input, num_cached, num_output))
