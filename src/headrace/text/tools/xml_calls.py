"""Arguments between tags, one parameter after the other: <parameter=city>Rome</parameter>.

A parameter's types decide whether its value is text or JSON. Text is streamed as it arrives, other values when they
are complete.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.text.tools.calls import ParameterTypes
from headrace.text.tools.json_scanner import Found
from headrace.text.tools.values import dumped, text_as_json

MAX_TAG_LEN = 512


@dataclass(frozen=True)
class TagSyntax:
    """How a format writes the parameters of a call."""

    open_start: str  # how the tag before a value starts
    open: re.Pattern[str]  # the whole tag: its key, and perhaps whether the value is text
    close: str  # after a value
    end: str  # after the last parameter
    trims_lines: bool = False  # the value is on lines of its own: one line break on each side is not part of it


class TaggedCall:
    """The parameters of a call whose name came before them."""

    def __init__(self, name: str, syntax: TagSyntax, types: ParameterTypes) -> None:
        self.name: str | None = name
        self.id: str | None = None
        self.arguments = ""
        self.text = ""
        self._syntax = syntax
        self._types = types
        self._pending = ""  # what is not yet part of the arguments
        self._key: str | None = None  # of the value that is open
        self._keys: set[str] = set()
        self._is_text = False
        self._has_written = False

    def feed(self, char: str) -> Found:
        pending = self._pending + char
        found = self._between(pending) if self._key is None else self._in_value(pending)
        if found is not Found.ERROR:
            self.text += char
        return found

    @property
    def can_be_announced(self) -> bool:
        return bool(self.arguments)

    @property
    def text_after_arguments(self) -> str:
        return self._pending

    def _between(self, pending: str) -> Found:
        """Expects a tag before a value, or the end."""
        self._pending = pending
        tag, syntax = pending.lstrip(), self._syntax
        if tag == syntax.end:
            self.arguments += "}" if self.arguments else "{}"
            return Found.OBJECT_END
        if opened := syntax.open.fullmatch(tag):
            return self._open(opened)
        may_open = syntax.open_start.startswith(tag) or tag.startswith(syntax.open_start)
        if len(tag) <= MAX_TAG_LEN and (may_open or syntax.end.startswith(tag)):
            return Found.NOTHING
        self._pending = pending[:-1]
        return Found.ERROR

    def _open(self, opened: re.Match[str]) -> Found:
        key = opened["key"].strip()
        if not key or key in self._keys:
            self._pending = self._pending[:-1]
            return Found.ERROR
        self._keys.add(key)
        self._key, self._pending, self._has_written = key, "", False
        said = opened.groupdict().get("string")
        self._is_text = said == "true" if said is not None else self._types.get(key) == ("string",)
        self.arguments += f"{', ' if self.arguments else '{'}{dumped(key)}: "
        if self._is_text:
            self.arguments += '"'
        return Found.NOTHING

    def _in_value(self, pending: str) -> Found:
        self._pending = pending
        if pending.endswith(self._syntax.close):
            self._close(pending[: -len(self._syntax.close)])
        elif self._is_text:
            self._stream(pending)
        return Found.NOTHING

    def _stream(self, pending: str) -> None:
        """Moves text into the arguments that cannot be part of what closes the value."""
        held = len(self._syntax.close) + self._syntax.trims_lines
        if len(pending) > held:
            self._write(pending[:-held])
            self._pending = pending[-held:]

    def _write(self, text: str) -> None:
        if self._syntax.trims_lines and not self._has_written:
            text = text.removeprefix("\n")
        self._has_written = True
        self.arguments += dumped(text)[1:-1]

    def _close(self, value: str) -> None:
        assert self._key is not None
        if self._is_text:
            self._write(value.removesuffix("\n") if self._syntax.trims_lines else value)
            self.arguments += '"'
        else:
            if self._syntax.trims_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            self.arguments += text_as_json(value, self._types.get(self._key, ()))
        self._key, self._pending = None, ""
