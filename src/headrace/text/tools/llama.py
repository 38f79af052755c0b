"""{"name": ..., "parameters": {...}}; ...  optionally after <|python_tag|>."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headrace.text.tools.json_calls import ObjectCall
from headrace.text.tools.parser import Marker, ToolParser
from headrace.text.tools.rules import ToolRule, object_calls, quoted, several


class LlamaParser(ToolParser):
    """Llama's calls have no marker, so they are recognized only at the start of the answer."""

    name = "llama3_json"
    aliases = ("llama3", "llama", "llama4_json")
    models = "Llama 3.1, 3.2, 3.3, and 4 with its own template"
    markers = ("<|python_tag|>",)
    cut_name = re.compile(r'"name": "([^"]*)("?)')

    @classmethod
    def fits(cls, template: str) -> bool:
        has_headers = "<|start_header_id|>" in template or "<|header_start|>" in template
        return cls.markers[0] in template or (has_headers and "tools" in template)

    @classmethod
    def rules(cls, tools: Sequence[ToolRule], marker: Marker, max_calls: int) -> list[str]:
        return [f"start: {several('call', quoted('; '), max_calls)}", *object_calls(tools, key="parameters")]

    def _before(self, is_end: bool) -> bool:
        (marker,) = self.markers
        rest = self._unread.lstrip()
        if not is_end and len(rest) < len(marker) and marker.startswith(rest):
            return False
        self._spaces += self._unread[: len(self._unread) - len(rest)]
        self._unread = rest.removeprefix(marker)
        if rest.startswith(marker):
            self._lead = marker
        self._state = self._at_call
        return True

    def _at_call(self, is_end: bool) -> bool:
        rest = self._unread.lstrip()
        if not rest:
            return False
        if rest[0] == "{":
            self._skip_spaces()
            self._begin(ObjectCall(needs_arguments=True))
        else:
            self._fail()
        return True

    def _after_call(self, is_end: bool) -> bool:
        """Expects a semicolon and another call, or text."""
        rest = self._unread.lstrip()
        if not rest:
            return False
        if rest[0] == ";" and not rest[1:].lstrip() and not is_end:
            return False
        if rest[0] == ";" and rest[1:].lstrip()[:1] == "{":
            self._skip(len(self._unread) - len(rest[1:].lstrip()))
            self._begin(ObjectCall(needs_arguments=True))
        else:
            self._state = self._only_text
        return True

    def _after_failure(self, is_end: bool) -> bool:
        self._state = self._only_text
        return True
