"""<tool_call>{"name": ..., "arguments": {...}}</tool_call>, and the same between other tags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from headrace.text.tools.json_calls import ObjectCall
from headrace.text.tools.parser import Marker, ToolParser
from headrace.text.tools.rules import ToolRule, object_calls, quoted, several


class HermesParser(ToolParser):
    """An object between tags."""

    name = "hermes"
    aliases: ClassVar[tuple[str, ...]] = ("qwen", "qwen2", "qwen3", "granite4", "ernie45")
    models = "Hermes 2 Pro and 3, Qwen2.5, Qwen3, QwQ, Granite 4, SmolLM3, ERNIE 4.5"
    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    cut_name = re.compile(r'"name": "([^"]*)("?)')
    key = "arguments"

    @classmethod
    def fits(cls, template: str) -> bool:
        return cls.markers[0] in template

    @classmethod
    def rules(cls, tools: Sequence[ToolRule], marker: Marker, max_calls: int) -> list[str]:
        begin, end = (marker(text) for text in cls.markers[:2])
        block = f'block: {begin} "\\n" call "\\n" {end}'
        return [f"start: {several('block', quoted(chr(10)), max_calls)}", block, *object_calls(tools, key=cls.key)]

    def _before(self, is_end: bool) -> bool:
        begin = self.markers[0]
        if self._find((begin,), is_end) is None:
            return False
        self._lead = begin
        self._begin(ObjectCall())
        return True

    def _after_call(self, is_end: bool) -> bool:
        if not self._drops((self.markers[1],), is_end):
            return False
        self._state = self._before
        return True


class LongcatParser(HermesParser):
    name = "longcat"
    aliases = ()
    models = "LongCat-Flash"
    markers = ("<longcat_tool_call>", "</longcat_tool_call>")


class InternlmParser(HermesParser):
    """The tag has two parts; arguments are called parameters."""

    name = "internlm"
    aliases = ("internlm2",)
    models = "InternLM 2.5 and 3"
    markers = ("<|action_start|><|plugin|>", "<|action_end|>", "<|action_start|>", "<|plugin|>")
    key = "parameters"

    @classmethod
    def fits(cls, template: str) -> bool:
        return "<|action_start|>" in template

    @classmethod
    def rules(cls, tools: Sequence[ToolRule], marker: Marker, max_calls: int) -> list[str]:
        begin = f"{marker('<|action_start|>')} {marker('<|plugin|>')}"
        block = f'block: {begin} "\\n" call "\\n" {marker("<|action_end|>")}'
        return [f"start: {several('block', quoted(chr(10)), max_calls)}", block, *object_calls(tools, key=cls.key)]
