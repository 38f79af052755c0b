"""Scans a JSON object character by character: whether it is still valid, and where its own keys and values are."""

from __future__ import annotations

import re
from enum import Enum, auto


class Found(Enum):
    """What a character means for the outermost object."""

    NOTHING = auto()
    KEY_END = auto()  # it closed a key
    VALUE_START = auto()  # it opened a value
    VALUE_END = auto()  # it closed a value: an object, a list, a text, true, false or null
    OBJECT_END = auto()  # it closed the object
    ERROR = auto()  # not valid JSON


class _Expected(Enum):
    VALUE = auto()
    FIRST_ITEM = auto()  # or the end of the list
    FIRST_KEY = auto()  # or the end of the object
    KEY = auto()
    COLON = auto()
    COMMA = auto()  # or the end of the list or object
    NOTHING = auto()


_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_ESCAPES = frozenset('"\\/bfnrtu')
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSING = {"}": "{", "]": "["}


class JsonScanner:
    """The scanner. After an error, or after the object's end, only white space may be fed."""

    def __init__(self) -> None:
        self._open: list[str] = []  # brackets
        self._expected = _Expected.VALUE
        self._is_key = False
        self._in_text = False
        self._is_escaped = False  # after a backslash
        self._num_hex = 0  # digits left of a \\u
        self._literal = ""  # what is missing of one
        self._number = ""

    def feed(self, char: str) -> Found:
        if self._in_text:
            return self._in_a_text(char)
        if self._literal:
            return self._in_a_literal(char)
        if self._number and char in "0123456789+-.eE":
            self._number += char
            return Found.NOTHING
        if self._number and not self._ends_number():
            return Found.ERROR
        if char in " \t\r\n":
            return Found.NOTHING
        return self._at_rest(char)

    def _at_rest(self, char: str) -> Found:
        expected = self._expected
        if char in "}]":
            return self._close(char)
        if expected in (_Expected.VALUE, _Expected.FIRST_ITEM):
            return self._begin_value(char)
        if expected in (_Expected.KEY, _Expected.FIRST_KEY) and char == '"':
            self._in_text = self._is_key = True
            return Found.NOTHING
        if expected is _Expected.COLON and char == ":":
            self._expected = _Expected.VALUE
            return Found.NOTHING
        if expected is _Expected.COMMA and char == ",":
            self._expected = _Expected.KEY if self._open[-1] == "{" else _Expected.VALUE
            return Found.NOTHING
        return Found.ERROR

    def _begin_value(self, char: str) -> Found:
        found = Found.VALUE_START if len(self._open) == 1 else Found.NOTHING
        if char in "{[":
            self._open.append(char)
            self._expected = _Expected.FIRST_KEY if char == "{" else _Expected.FIRST_ITEM
            return found if len(self._open) > 1 or char == "{" else Found.ERROR
        if not self._open:
            return Found.ERROR  # an object was expected
        if char == '"':
            self._in_text, self._is_key = True, False
        elif char in _LITERALS:
            self._literal = _LITERALS[char]
        elif char in "-0123456789":
            self._number = char
        else:
            return Found.ERROR
        return found

    def _close(self, char: str) -> Found:
        may_close = (_Expected.COMMA, _Expected.FIRST_KEY if char == "}" else _Expected.FIRST_ITEM)
        if not self._open or self._open[-1] != _CLOSING[char] or self._expected not in may_close:
            return Found.ERROR
        self._open.pop()
        if not self._open:
            self._expected = _Expected.NOTHING
            return Found.OBJECT_END
        return self._end_value()

    def _end_value(self) -> Found:
        self._expected = _Expected.COMMA
        return Found.VALUE_END if len(self._open) == 1 else Found.NOTHING

    def _ends_number(self) -> bool:
        number, self._number = self._number, ""
        self._expected = _Expected.COMMA
        return _NUMBER.fullmatch(number) is not None

    def _in_a_text(self, char: str) -> Found:
        if self._is_escaped or self._num_hex:
            return self._in_an_escape(char)
        if char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_text = False
            if self._is_key:
                self._is_key = False
                self._expected = _Expected.COLON
                return Found.KEY_END if len(self._open) == 1 else Found.NOTHING
            return self._end_value()
        elif char < " ":
            return Found.ERROR
        return Found.NOTHING

    def _in_an_escape(self, char: str) -> Found:
        if self._num_hex:
            self._num_hex -= 1
            return Found.NOTHING if char in _HEX else Found.ERROR
        self._is_escaped = False
        self._num_hex = 4 if char == "u" else 0
        return Found.NOTHING if char in _ESCAPES else Found.ERROR

    def _in_a_literal(self, char: str) -> Found:
        if char != self._literal[0]:
            return Found.ERROR
        self._literal = self._literal[1:]
        return Found.NOTHING if self._literal else self._end_value()
