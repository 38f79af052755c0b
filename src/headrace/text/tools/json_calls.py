"""The JSON of one tool call, as far as it has arrived."""

from __future__ import annotations

import json

from headrace.text.tools.json_scanner import Found, JsonScanner

_ARGUMENTS = ("arguments", "parameters")


class NamedCall:
    """The arguments of a call whose name came before them."""

    def __init__(self, name: str, call_id: str | None) -> None:
        self.name: str | None = name
        self.id = call_id
        self.arguments = ""
        self._scanner = JsonScanner()

    @property
    def text(self) -> str:
        return self.arguments

    def feed(self, char: str) -> Found:
        found = self._scanner.feed(char)
        if found is not Found.ERROR:
            self.arguments += char
        return found

    @property
    def can_be_announced(self) -> bool:
        return bool(self.arguments)

    @property
    def text_after_arguments(self) -> str:
        return ""


class ObjectCall:
    """{"name": "...", "arguments": {...}}, in either order; arguments may be called parameters, and may be left out
    unless they are needed to tell a call from any other object."""

    def __init__(
        self, *, needs_arguments: bool = False, name_key: str = "name", id_key: str = "id", keeps_id: bool = True
    ) -> None:
        self.name: str | None = None
        self.id: str | None = None
        self.arguments = ""
        self.text = ""
        self._needs_arguments = needs_arguments
        self._name_key = name_key
        self._id_key = id_key
        self._keeps_id = keeps_id
        self._scanner = JsonScanner()
        self._part_start = 0  # start of the current key or value in `text`
        self._key = ""
        self._arguments_end: int | None = None
        self._has_arguments = False
        self._streams = False  # inside arguments that are an object

    def feed(self, char: str) -> Found:
        found = self._scanner.feed(char)
        if found is Found.ERROR or (found is Found.VALUE_START and not self._begins(char)):
            return Found.ERROR
        if found is Found.OBJECT_END and not self._is_a_call():
            return Found.ERROR
        self.text += char
        if self._streams:
            self.arguments += char
        if found is Found.KEY_END:
            self._key = _text(self.text[self.text.index('"', self._part_start) :]) or ""
        elif found is Found.VALUE_END and not self._takes(self.text[self._part_start :]):
            self.text = self.text[:-1]
            return Found.ERROR
        if found in (Found.KEY_END, Found.VALUE_END):
            self._part_start = len(self.text)
        return found

    @property
    def can_be_announced(self) -> bool:
        return self.name is not None and bool(self.arguments)

    @property
    def text_after_arguments(self) -> str:
        return "" if self._arguments_end is None else self.text[self._arguments_end :]

    def _begins(self, char: str) -> bool:
        """Tells whether the current key may have a value that starts like this."""
        self._part_start = len(self.text)
        if self._key not in _ARGUMENTS:
            return self._key in (self._name_key, self._id_key, "type") and char == '"'
        is_second, self._has_arguments = self._has_arguments, True
        self._streams = char == "{"
        return not is_second and char in '{"'

    def _takes(self, value: str) -> bool:
        """Tells whether the current value, which is complete, is valid in a call."""
        if self._streams:
            self._streams = False
            self._arguments_end = len(self.text)
            return True
        decoded = _text(value)
        if decoded is None:
            return False
        if self._key in _ARGUMENTS:  # an object as a string, which some models write
            if not _is_object(decoded):
                return False
            self.arguments = decoded
            self._arguments_end = len(self.text)
            return True
        if self._key == self._name_key:
            if self.name is not None or not decoded:
                return False
            self.name = decoded
            return True
        if self._key == self._id_key:
            if self._keeps_id and not self._has_arguments:  # else the call may have been announced with other arguments
                self.id = decoded
            return True
        return decoded == "function"

    def _is_a_call(self) -> bool:
        if self.name is None or (self._needs_arguments and not self._has_arguments):
            return False
        self.arguments = self.arguments or "{}"
        return True


def _text(literal: str) -> str | None:
    """Returns the text of a JSON literal; None if it contains half a character."""
    text = str(json.loads(literal))
    try:
        text.encode()
    except UnicodeEncodeError:
        return None
    return text


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
