"""Validates the input of a batch, all or nothing: one bad line fails the batch, and each bad line is reported.

Checked are the envelope of each line, its model and `stream`. Other errors in a body concern one line only: it gets an
error line when the batch runs, as in `headrace run`.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import RequestError, nearest
from headrace.jobs.formats import open_source
from headrace.jobs.formats.reader import MAX_LINE_BYTES, InputLine
from headrace.jobs.input.openai_lines import DUPLICATE_ID, read_endpoint
from headrace.openai.errors import MODEL_NOT_FOUND, UNSUPPORTED
from headrace.server.batch.records import LineError

MAX_ERRORS = 1_000  # more are counted, and not listed
MAX_SHOWN = 100  # characters of a value in a message


@dataclass
class Validated:
    """What was found in a file."""

    num_lines: int = 0
    num_errors: int = 0
    errors: list[LineError] = field(default_factory=list)
    adapters: set[str] = field(default_factory=set)  # that lines name

    def add(self, error: LineError) -> None:
        self.num_errors += 1
        if self.num_errors <= MAX_ERRORS:
            self.errors.append(error)


def validate(
    path: Path,
    *,
    endpoint: str,
    model_name: str,
    max_requests: int,
    other_names: Collection[str] = (),
    adapters: Collection[str] = (),
) -> Validated:
    check = _LineCheck(endpoint, (model_name, *other_names), adapters)
    found = Validated(adapters=check.adapters_used)
    with closing(open_source(str(path), format="jsonl")) as source:
        for lines in source.read_batches(limit=max_requests + 1):
            for line in lines:
                found.num_lines += 1
                if (error := check.error_in(line)) is not None:
                    found.add(error)
    if found.num_lines == 0:
        found.add(LineError("empty_file", "the input file has no requests"))
    if found.num_lines > max_requests:
        message = f"the input file has more than {max_requests:,} requests; split it into several batches"
        found.add(LineError("too_many_tasks", message))
    if found.num_errors > len(found.errors):
        num_more = found.num_errors - len(found.errors)
        found.errors.append(LineError("more_errors", f"{num_more:,} more errors are not listed"))
    return found


class _LineCheck:
    """The checks of one file's lines, in their order."""

    def __init__(self, endpoint: str, model_names: Collection[str], adapters: Collection[str]) -> None:
        self._endpoint = endpoint
        self._model_names = model_names
        self._adapters = adapters
        self.adapters_used: set[str] = set()
        self._decode = msgspec.json.Decoder().decode
        self._first_lines: dict[str, int] = {}  # by custom_id

    def error_in(self, line: InputLine) -> LineError | None:
        number = line.number
        if line.is_too_long:
            message = f"the line is longer than {MAX_LINE_BYTES // 2**20} MiB"
            return LineError("line_too_long", message, number)
        try:
            decoded = self._decode(line.data)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return LineError("invalid_json_line", "this line is not valid JSON", number)
        if not isinstance(decoded, dict):
            return LineError("invalid_json_line", "this line is not a JSON object", number)
        try:
            url = read_endpoint(decoded)
        except RequestError as error:
            return LineError(error.code, str(error), number, error.param)
        custom_id = decoded["custom_id"]
        first = self._first_lines.setdefault(custom_id, number)
        if first != number:
            message = f"custom_id {_shown(custom_id)} is already used by line {first}; ids must be unique in a file"
            return LineError(DUPLICATE_ID, message, number, "custom_id")
        if url != self._endpoint:
            message = f"url {url!r} differs from the endpoint of the batch, {self._endpoint!r}"
            return LineError("url_mismatch", message, number, "url")
        return self._error_in_body(decoded["body"], number)

    def _error_in_body(self, body: dict[str, Any], number: int) -> LineError | None:
        model = body.get("model")
        if isinstance(model, str) and model in self._adapters:
            self.adapters_used.add(model)
        elif model is not None and model not in self._model_names:
            known = (*self._model_names, *self._adapters)
            guess = nearest(str(model)[:MAX_SHOWN], known).rstrip("?")
            message = f"there is no model {_shown(model)} here{guess}; this server has {', '.join(map(repr, known))}"
            return LineError(MODEL_NOT_FOUND, message, number, "body.model")
        if body.get("stream"):
            return LineError(UNSUPPORTED, "a batch cannot stream; leave stream out", number, "body.stream")
        return None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
