"""Calls in Python's notation: [f(x=1), g(y="a")]."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from headrace.text.tools.call_lists import CallListParser
from headrace.text.tools.parser import Marker
from headrace.text.tools.python_calls import PythonCall
from headrace.text.tools.rules import ToolRule, python_calls, quoted, several

_CUT_NAME = re.compile(r"(?:^|[\[\n]|, )\s*([\w.-]+)(\(?)")


class PythonicParser(CallListParser):
    """A list without a marker, which is recognized only at the start of the answer."""

    name = "pythonic"
    models = "Llama 3.2 and ToolACE with templates that ask for it"
    markers: ClassVar[tuple[str, ...]] = ()  # what may stand around the list
    only_at_start = True
    cut_name = _CUT_NAME

    @classmethod
    def fits(cls, template: str) -> bool:
        return "func_name1(" in template

    @classmethod
    def rules(cls, tools: Sequence[ToolRule], marker: Marker, max_calls: int) -> list[str]:
        return [f'start: "[" {several("call", quoted(", "), max_calls)} "]"', *python_calls(tools)]

    def _before(self, is_end: bool) -> bool:
        rest = self._unread.lstrip()
        begin = self.markers[0] if self.markers else ""
        if not is_end and (not rest or (len(rest) < len(begin) and begin.startswith(rest))):
            return False
        self._spaces += self._unread[: len(self._unread) - len(rest)]
        self._unread = rest
        if begin and rest.startswith(begin):
            self._skip(len(begin))
        self._state = self._at_list
        return True

    def _at_call(self, is_end: bool) -> bool:
        self._skip_spaces()
        if self._unread:
            self._begin(PythonCall())
        return True


class Llama4PythonicParser(PythonicParser):
    name = "llama4_pythonic"
    models = "Llama 4"
    markers = ("<|python_start|>", "<|python_end|>")
    ends = markers[1:]

    @classmethod
    def fits(cls, template: str) -> bool:
        return "<|header_start|>" in template and ("func_name1(" in template or "<|python_start|>" in template)


class Lfm2Parser(PythonicParser):
    """A list between markers, anywhere in the answer."""

    name = "lfm2"
    models = "LFM2 and LFM2.5"
    markers = ("<|tool_call_start|>", "<|tool_call_end|>")
    ends = markers[1:]
    only_at_start = False

    @classmethod
    def fits(cls, template: str) -> bool:
        shown = (cls.markers[0], "<|tool_list_start|>", "List of tools: [")
        return any(text in template for text in shown)

    @classmethod
    def rules(cls, tools: Sequence[ToolRule], marker: Marker, max_calls: int) -> list[str]:
        begin, end = (marker(text) for text in cls.markers)
        return [f'start: {begin} "[" {several("call", quoted(", "), max_calls)} "]" {end}', *python_calls(tools)]

    def _before(self, is_end: bool) -> bool:
        if self._find(self.markers[:1], is_end) is None:
            return False
        self._lead = self.markers[0]
        self._state = self._at_list
        return True


class Olmo3Parser(Lfm2Parser):
    """A line for each call."""

    name = "olmo3"
    models = "OLMo 3"
    markers = ("<function_calls>", "</function_calls>")
    ends = markers[1:]

    @classmethod
    def fits(cls, template: str) -> bool:
        return cls.markers[0] in template

    @classmethod
    def rules(cls, tools: Sequence[ToolRule], marker: Marker, max_calls: int) -> list[str]:
        begin, end = (marker(text) for text in cls.markers)
        return [f"start: {begin} {several('call', quoted(chr(10)), max_calls)} {end}", *python_calls(tools)]

    def _at_list(self, is_end: bool) -> bool:
        self._state = self._at_call
        return True

    def _after_call(self, is_end: bool) -> bool:
        end = self.markers[1]
        rest = self._unread.lstrip()
        if not is_end and end.startswith(rest):
            return False
        if not rest or rest.startswith(end):
            self._unread = rest[len(end) :]
            self._state = self._before
        elif rest[0].isalpha() or rest[0] == "_":
            self._skip_spaces()
            self._state = self._at_call
        else:
            self._state = self._before
        return True
