"""A tool call in Python's notation: name(key=value, ...). Each argument is added when its value is complete."""

from __future__ import annotations

import re

from headrace.text.tools.json_scanner import Found
from headrace.text.tools.values import dumped, literal_as_json

_NAME = re.compile(r"[A-Za-z_][\w.-]{0,255}")
_KEY = re.compile(r"\s*([A-Za-z_]\w{0,255})\s*=")
_OPENING, _CLOSING = "([{", ")]}"


class PythonCall:
    """From the name to the closing bracket."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.id: str | None = None
        self.arguments = ""
        self.text = ""
        self._pending = ""  # what is not yet part of the arguments
        self._state = self._in_name
        self._keys: set[str] = set()
        self._depth = 0
        self._quote = ""  # of the text that is open
        self._is_escaped = False

    @property
    def can_be_announced(self) -> bool:
        return bool(self.arguments)

    @property
    def text_after_arguments(self) -> str:
        return self._pending

    def feed(self, char: str) -> Found:
        found = self._state(char)
        if found is not Found.ERROR:
            self.text += char
        return found

    def _in_name(self, char: str) -> Found:
        if char == "(" and self._pending:
            self.name, self._pending = self._pending, ""
            self._state = self._in_key
            return Found.NOTHING
        if not _NAME.fullmatch(self._pending + char):
            return Found.ERROR
        self._pending += char
        return Found.NOTHING

    def _in_key(self, char: str) -> Found:
        """Before a value, or at the end of the call."""
        pending = self._pending + char
        if char == ")" and not self._pending.strip():
            return self._end()
        if key := _KEY.fullmatch(pending):
            if key[1] in self._keys:
                return Found.ERROR
            self._keys.add(key[1])
            self._pending = ""
            self.arguments += f"{', ' if self.arguments else '{'}{dumped(key[1])}: "
            self._state = self._in_value
            return Found.NOTHING
        word = pending.strip()
        if word and not re.fullmatch(r"[A-Za-z_]\w{0,255}", word):
            return Found.ERROR
        self._pending = pending
        return Found.NOTHING

    def _in_value(self, char: str) -> Found:
        if self._quote:
            self._in_quotes(char)
        elif char in "'\"":
            self._quote = char
        elif self._depth == 0 and char in ",)":
            return self._end_value(char)
        elif char in _OPENING:
            self._depth += 1
        elif char in _CLOSING:
            self._depth -= 1
            if self._depth < 0:
                return Found.ERROR
        self._pending += char
        return Found.NOTHING

    def _in_quotes(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == self._quote:
            self._quote = ""

    def _end_value(self, char: str) -> Found:
        value = literal_as_json(self._pending.strip())
        if value is None:
            return Found.ERROR
        self.arguments += value
        self._pending = ""
        self._state = self._in_key
        return self._end() if char == ")" else Found.NOTHING

    def _end(self) -> Found:
        self.arguments += "}" if self.arguments else "{}"
        return Found.OBJECT_END
