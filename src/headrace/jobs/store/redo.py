"""Which lines to repeat, and with which parameters: `--redo 'finish_reason=length' --set max_tokens=2048`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.errors import ConfigError, JobError, RequestError, nearest
from headrace.jobs.input.fields import SAMPLING_FIELDS, sampling_params
from headrace.jobs.store.record import Record

ERROR = "error"
FINISH_REASON = "finish_reason"
_REASON_OF_STATUS = {"completed": "stop", "incomplete": "length"}


@dataclass(frozen=True, slots=True)
class Condition:
    """`field=value`, `field!=value`, or `error` alone."""

    field: str
    value: Any = None
    is_equal: bool = True
    is_bare: bool = False

    def matches(self, record: Record, line: Mapping[str, Any]) -> bool:
        if self.is_bare:
            return record.error is not None
        return (self.value in self.values(record, line)) == self.is_equal

    def values(self, record: Record, line: Mapping[str, Any]) -> list[Any]:
        if self.field == ERROR:
            return [] if record.error is None else [record.error]
        if self.field == FINISH_REASON:
            return list(_finish_reasons(line))
        found: Any = line
        for name in self.field.split("."):
            if not isinstance(found, dict) or name not in found:
                return []
            found = found[name]
        return [found]


class Where:
    """A conjunction of conditions. Notes which of their fields exist, so that a misspelt one can be refused."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._conditions = [_read_condition(part) for part in text.split(" and ")]
        self._unseen = {
            condition.field for condition in self._conditions if condition.field not in (ERROR, FINISH_REASON)
        }
        self._known: set[str] = {ERROR, FINISH_REASON}
        self._decode = msgspec.json.Decoder().decode

    def matches(self, record: Record) -> bool:
        line = self._decode(record.result)
        if self._unseen:
            self._look(record, line)
        return all(condition.matches(record, line) for condition in self._conditions)

    def refuse_unseen(self) -> None:
        for name in sorted(self._unseen):
            raise JobError(
                f"--redo {self.text!r}: no result has a field {name!r}{nearest(name, self._known)} "
                f"(fields: {', '.join(sorted(self._known))})"
            )

    def _look(self, record: Record, line: Mapping[str, Any]) -> None:
        self._known.update(line)
        for condition in self._conditions:
            if condition.values(record, line):
                self._unseen.discard(condition.field)


def read_overrides(given: Sequence[str]) -> dict[str, Any]:
    """`name=value` of `--set`; a value that is not JSON is text."""
    overrides = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"--set {text!r} must be NAME=VALUE, such as max_tokens=2048")
        if name not in SAMPLING_FIELDS:
            raise ConfigError(f"--set {text!r}: unknown parameter {name!r}{nearest(name, SAMPLING_FIELDS)}")
        overrides[name] = _read_value(value)
    try:
        sampling_params(overrides, {})
    except RequestError as error:
        raise ConfigError(f"--set: {error}") from error
    return overrides


def _read_condition(text: str) -> Condition:
    text = text.strip()
    if text == ERROR:
        return Condition(ERROR, is_bare=True)
    name, separator, value = text.partition("=")
    if not separator or not name.strip("! "):
        raise ConfigError(
            f"--redo: {text!r} is not a condition; write 'error', FIELD=VALUE or FIELD!=VALUE, joined by ' and '"
        )
    return Condition(name.rstrip("! ").strip(), _read_value(value.strip()), is_equal=not name.rstrip().endswith("!"))


def _read_value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _finish_reasons(line: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the finish reasons of the answers of a plain line, or of the choices of an OpenAI completion. A response
    has a status instead."""
    if FINISH_REASON in line:
        yield line[FINISH_REASON]
    for answer in line.get("outputs") or ():
        yield answer.get(FINISH_REASON)
    response = line.get("response")
    body = (response.get("body") if isinstance(response, dict) else None) or {}
    for choice in body.get("choices") or ():
        yield choice.get(FINISH_REASON)
    if body.get("object") == "response":
        yield _REASON_OF_STATUS.get(body["status"])
