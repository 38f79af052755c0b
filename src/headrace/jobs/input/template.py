"""Prompts made of the columns of a row: 'Summarise: {text}'. Literal braces are doubled: '{{' and '}}'.

A dotted name reads a nested object: {author.name}. Text is inserted as it is, everything else as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.errors import ConfigError, JobError, RequestError, nearest
from headrace.jobs.formats.source import Source
from headrace.jobs.formats.table import shown

NUM_CHECKED_ROWS = 100  # each column of a template must be in one of the first rows

_TOKENS = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclass(frozen=True, slots=True)
class Template:
    source: str
    parts: tuple[str, ...]  # text, column, text, column, ..., text

    @classmethod
    def parse(cls, source: str) -> Template:
        parts, text, end = [], "", 0
        for token in _TOKENS.finditer(source):
            text += source[end : token.start()]
            end = token.end()
            if token[0] in ("{{", "}}"):
                text += token[0][0]
            elif column := (token[1] or "").strip():
                parts += [text, column]
                text = ""
            else:
                raise ConfigError(
                    f"{token[0]!r} at character {token.start() + 1} of {source!r} names no column; "
                    "write {column}, or double the brace to have it in the prompt"
                )
        return cls(source, (*parts, text + source[end:]))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.parts[1::2]))

    def render(self, row: Mapping[str, Any]) -> str:
        pieces = list(self.parts)
        for place in range(1, len(pieces), 2):
            pieces[place] = _text(row, pieces[place])
        return "".join(pieces)


@dataclass(frozen=True, slots=True)
class LineTemplate:
    """How a line of data becomes a request. With a system prompt or `is_chat`, the prompt is the user message."""

    prompt: Template | None = None
    system: Template | None = None
    messages_column: str | None = None
    is_chat: bool = False

    @classmethod
    def of(
        cls,
        *,
        prompt: str | None = None,
        system: str | None = None,
        messages_column: str | None = None,
        is_chat: bool = False,
    ) -> LineTemplate | None:
        """Returns None if nothing is given: then lines are requests themselves."""
        if prompt is None and messages_column is None:
            if system is not None or is_chat:
                raise ConfigError(f"{'a system prompt' if system is not None else 'chat'} needs a prompt template too")
            return None
        if prompt is not None and messages_column is not None:
            raise ConfigError("a prompt template and a messages column exclude each other; give one")
        return cls(
            None if prompt is None else Template.parse(prompt),
            None if system is None else Template.parse(system),
            messages_column,
            is_chat or system is not None,
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads."""
        named = [column for template in (self.prompt, self.system) if template for column in template.columns]
        return tuple(dict.fromkeys([*named, *([self.messages_column] if self.messages_column else [])]))

    def fields(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The `prompt` or `messages` of a plain line."""
        if self.messages_column is not None:
            return {"messages": self._with_system(_messages(row, self.messages_column), row)}
        assert self.prompt is not None
        text = self.prompt.render(row)
        if not self.is_chat:
            return {"prompt": text}
        return {"messages": self._with_system([{"role": "user", "content": text}], row)}

    def check(self, source: Source) -> None:
        """Refuse columns that do not exist, before a model is loaded: by the header of a table, or by the first lines
        of JSON. A stream cannot be checked, since it can be read only once."""
        if source.columns is not None:
            self._check_names(source.columns, source.name, "has")
        elif source.identity(0) is not None:
            self._check_first_rows(source)

    def _check_first_rows(self, source: Source) -> None:
        rows = []
        for line in next(source.read_batches(limit=NUM_CHECKED_ROWS), []):
            try:
                row = msgspec.json.decode(line.data)
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                continue
            if isinstance(row, dict):
                rows.append(row)
        if rows:
            names = dict.fromkeys(name for row in rows for name in row)
            self._check_names(tuple(names), source.name, "starts with rows that have")

    def _check_names(self, names: Sequence[str], source: str, verb: str) -> None:
        for column in self.columns:
            if column not in names and column.partition(".")[0] not in names:
                raise JobError(
                    f"there is no column {column!r}{nearest(column, names)}; {source} {verb} the columns {shown(names)}"
                )

    def _with_system(self, messages: list[Any], row: Mapping[str, Any]) -> list[Any]:
        if self.system is None:
            return messages
        return [{"role": "system", "content": self.system.render(row)}, *messages]


def _messages(row: Mapping[str, Any], column: str) -> list[Any]:
    value = _value(row, column)
    if isinstance(value, str):  # CSV has only text
        try:
            value = msgspec.json.decode(value.encode())
        except (msgspec.DecodeError, UnicodeError):
            raise RequestError(f"column {column!r} is text, but not a JSON list of messages", param=column) from None
    if not isinstance(value, list):
        raise RequestError(f"column {column!r} must be a list of messages", param=column)
    if not value:
        raise RequestError(f"column {column!r} must have at least one message", param=column)
    return value


def _text(row: Mapping[str, Any], column: str) -> str:
    value = _value(row, column)
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _value(row: Mapping[str, Any], column: str) -> Any:
    value: Any = row.get(column)
    if value is None and column not in row and "." in column:
        value = row
        for name in column.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
    if value is None:
        why = "is null" if column in row else f"is missing; the row has {shown(list(row)) or 'none'}"
        raise RequestError(f"column {column!r} {why}", param=column, code="missing_column")
    return value
