"""[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]  or  [TOOL_CALLS]name[ARGS]{...}."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headrace.text.tools.json_calls import NamedCall, ObjectCall
from headrace.text.tools.parser import Marker, ToolParser
from headrace.text.tools.rules import ToolRule, named_calls, object_calls, quoted, several

_CALL = re.compile(r"\s*([\w.-]{1,256})(?:\[CALL_ID\]([\w-]{1,64}))?(?:\[ARGS\])?\s*(?=\{)")
_CALL_BEGINNING = re.compile(r"[\w.\-\[\]\s]{0,400}")


class MistralParser(ToolParser):
    """Mistral's marker is followed by a list of objects (older models), or by a name and its arguments."""

    name = "mistral"
    models = "Mistral 7B v0.3, Nemo, Small, Large, Devstral, Magistral, Ministral"
    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    cut_name = re.compile(r'(?:"name": "|\[TOOL_CALLS\]\s*(?![\s\[]))([\w.-]*)([^\w.-]?)')

    @classmethod
    def fits(cls, template: str) -> bool:
        return cls.markers[0] in template

    @classmethod
    def rules(cls, tools: Sequence[ToolRule], marker: Marker, max_calls: int) -> list[str]:
        """The newer notation where its separator is a special token."""
        begin, separator = marker("[TOOL_CALLS]"), marker("[ARGS]")
        if separator.startswith("<["):
            calls = named_calls(tools, lambda name: f"{begin} {quoted(name)} {separator}", "")
            return [f"start: {several('call', '', max_calls)}", *calls]
        calls = object_calls(tools)
        return [f'start: {begin} " "? "[" {several("call", quoted(", "), max_calls)} "]"', *calls]

    def _before(self, is_end: bool) -> bool:
        marker = self.markers[0]
        if self._find((marker,), is_end) is None:
            return False
        self._lead = marker
        self._is_list = False
        self._state = self._after_marker
        return True

    def _after_marker(self, is_end: bool) -> bool:
        rest = self._unread.lstrip()
        if not rest:
            return False
        if rest[0] == "[":
            self._is_list = True
            self._skip(len(self._unread) - len(rest) + 1)
            self._state = self._at_object
        elif named := _CALL.match(self._unread):
            self._skip(named.end())
            self._begin(NamedCall(named[1], named[2]))
        elif is_end or "{" in rest or not _CALL_BEGINNING.fullmatch(rest):
            self._fail()
        else:
            return False
        return True

    def _at_object(self, is_end: bool) -> bool:
        self._skip_spaces()
        if self._unread.startswith("{"):
            self._begin(ObjectCall())
        elif self._unread:
            self._fail()
        return True

    def _after_call(self, is_end: bool) -> bool:
        rest = self._unread.lstrip() if self._is_list else ""
        if self._is_list and not rest:
            return False
        if rest[:1] == ",":
            self._skip(len(self._unread) - len(rest) + 1)
            self._state = self._at_object
            return True
        if rest[:1] == "]":
            self._unread = rest[1:]
        self._state = self._before
        return True
