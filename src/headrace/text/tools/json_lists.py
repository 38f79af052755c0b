"""A list of objects after a marker: <|tool_call|>[{"name": ..., "arguments": {...}}, ...]."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Sequence
from typing import ClassVar

from headrace.text.tools.call_lists import CallListParser
from headrace.text.tools.json_calls import ObjectCall
from headrace.text.tools.parser import Marker
from headrace.text.tools.rules import ToolRule, object_calls, quoted, several


class ListParser(CallListParser, ABC):
    """The list starts after one of `begins` and may be followed by one of `ends`."""

    begins: ClassVar[tuple[str, ...]]
    name_key: ClassVar[str] = "name"
    key: ClassVar[str] = "arguments"
    cut_name = re.compile(r'"name": "([^"]*)("?)')

    @classmethod
    def fits(cls, template: str) -> bool:
        return cls.begins[0] in template

    @classmethod
    def rules(cls, tools: Sequence[ToolRule], marker: Marker, max_calls: int) -> list[str]:
        calls = several("call", quoted(", "), max_calls)
        end = marker(cls.ends[0]) if cls.ends else ""
        objects = object_calls(tools, name_key=cls.name_key, key=cls.key)
        return [f'start: {marker(cls.begins[0])} "[" {calls} "]" {end}', *objects]

    def _new_call(self) -> ObjectCall:
        return ObjectCall()

    def _before(self, is_end: bool) -> bool:
        found = self._find(self.begins, is_end)
        if found is None:
            return False
        self._lead = found
        self._state = self._at_list
        return True

    def _at_call(self, is_end: bool) -> bool:
        self._skip_spaces()
        if self._unread.startswith("{"):
            self._begin(self._new_call())
        elif self._unread:
            self._fail()
        return True


class GraniteParser(ListParser):
    name = "granite"
    models = "Granite 3.0 to 3.3"
    begins = ("<|tool_call|>", "<tool_call>")
    ends = ("</tool_call>",)
    markers = ("<|tool_call|>", "<tool_call>")

    @classmethod
    def fits(cls, template: str) -> bool:
        return "<|tool_call|>" in template and "<|tool|>" not in template

    @classmethod
    def rules(cls, tools: Sequence[ToolRule], marker: Marker, max_calls: int) -> list[str]:
        calls = several("call", quoted(", "), max_calls)
        return [f'start: {marker(cls.begins[0])} "[" {calls} "]"', *object_calls(tools)]


class JambaParser(ListParser):
    name = "jamba"
    aliases = ("hunyuan_a13b",)
    models = "Jamba 1.5, Hunyuan A13B"
    begins = ("<tool_calls>",)
    ends = ("</tool_calls>",)
    markers = ("<tool_calls>", "</tool_calls>")


class NemotronParser(ListParser):
    """The name is that of the plugin for vLLM which these models are published with."""

    name = "nemotron_json"
    models = "Nemotron-H, Nemotron Nano 2"
    begins = ("<TOOLCALL>",)
    ends = ("</TOOLCALL>",)
    markers = ("<TOOLCALL>", "</TOOLCALL>")


class Phi4MiniParser(ListParser):
    name = "phi4_mini_json"
    models = "Phi-4-mini"
    begins = ("functools", "<|tool_call|>")
    ends = ("<|/tool_call|>",)
    markers = ("<|tool_call|>", "<|/tool_call|>")

    @classmethod
    def fits(cls, template: str) -> bool:
        return "functools[" in template or "<|tool|>" in template

    @classmethod
    def rules(cls, tools: Sequence[ToolRule], marker: Marker, max_calls: int) -> list[str]:
        calls = several("call", quoted(", "), max_calls)
        return [f'start: "functools[" {calls} "]"', *object_calls(tools)]


class CohereParser(ListParser):
    """The older models write a block of code after `Action:`. Ids of calls are numbers within the answer, so they are
    replaced."""

    name = "cohere_command3"
    aliases = ("command-r", "command_r", "cohere")
    models = "Command R, R+, R7B, A and A Reasoning"
    begins = ("<|START_ACTION|>", "Action: ```json", "Action:```json", "Action:\n```json")
    ends = ("<|END_ACTION|>", "```")
    markers = ("<|START_ACTION|>", "<|END_ACTION|>")
    name_key = "tool_name"
    key = "parameters"
    cut_name = re.compile(r'"tool_name": "([^"]*)("?)')

    @classmethod
    def fits(cls, template: str) -> bool:
        is_older = "Action:" in template and "```json" in template and "<|START_OF_TURN_TOKEN|>" in template
        return is_older or "<|START_ACTION|>" in template

    def _new_call(self) -> ObjectCall:
        return ObjectCall(name_key=self.name_key, id_key="tool_call_id", keeps_id=False)


class XlamParser(ListParser):
    """A list without a marker, which is recognized only at the start of the answer, perhaps as a block of code."""

    name = "xlam"
    models = "xLAM 2"
    begins = ("```json", "```", "[TOOL_CALLS]", "<tool_call>")
    ends = ("```", "</tool_call>")
    markers = ("[TOOL_CALLS]", "<tool_call>")
    only_at_start = True

    @classmethod
    def fits(cls, template: str) -> bool:
        return False  # nothing in its templates tells it apart

    @classmethod
    def rules(cls, tools: Sequence[ToolRule], marker: Marker, max_calls: int) -> list[str]:
        return [f'start: "[" {several("call", quoted(", "), max_calls)} "]"', *object_calls(tools)]

    def _before(self, is_end: bool) -> bool:
        rest = self._unread.lstrip()
        if not is_end and any(len(rest) < len(begin) and begin.startswith(rest) for begin in self.begins):
            return False
        self._spaces += self._unread[: len(self._unread) - len(rest)]
        self._unread = rest
        begin = next((begin for begin in self.begins if rest.startswith(begin)), "")
        self._skip(len(begin))
        self._state = self._at_list
        return True
