"""A name in a header, then a JSON object: <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Sequence
from typing import ClassVar

from headrace.text.tools.json_calls import NamedCall
from headrace.text.tools.parser import Marker, ToolParser
from headrace.text.tools.rules import ToolRule, named_calls, quoted, several

MAX_HEAD_LEN = 640  # longer than any header that the patterns match


class HeadedParser(ToolParser, ABC):
    """Calls may be inside a section. A header has no brace; what a pattern matches ends before one."""

    section: ClassVar[tuple[str, str] | None] = None
    begin: ClassVar[str]  # what a header starts with
    head: ClassVar[re.Pattern[str]]  # what follows, with the name
    ends: ClassVar[tuple[str, ...]] = ()  # after the object, in this order; each may be missing

    @classmethod
    def fits(cls, template: str) -> bool:
        return cls.begin in template

    def _before(self, is_end: bool) -> bool:
        begins = (self.begin,) if self.section is None else (self.section[0], self.begin)
        found = self._find(begins, is_end)
        if found is None:
            return False
        self._lead = found
        self._state = self._at_head if found == self.begin else self._in_section
        return True

    def _in_section(self, is_end: bool) -> bool:
        """Expects the start of a header."""
        rest = self._unread.lstrip()
        if rest.startswith(self.begin):
            self._skip(len(self._unread) - len(rest) + len(self.begin))
            self._state = self._at_head
        elif is_end or not self.begin.startswith(rest):
            self._fail()
        else:
            return False
        return True

    def _at_head(self, is_end: bool) -> bool:
        if found := self.head.match(self._unread):
            self._skip(found.end())
            self._begin(NamedCall(found["name"], found.groupdict().get("id")))
        elif is_end or "{" in self._unread or len(self._unread) > MAX_HEAD_LEN:
            self._fail()
        else:
            return False
        return True

    def _after_call(self, is_end: bool) -> bool:
        """Drops what ends the call; then another call of the section may follow."""
        self._ends_left = list(self.ends)
        self._state = self._at_ends
        return True

    def _at_ends(self, is_end: bool) -> bool:
        while self._ends_left:
            if not self._drops(self._ends_left[:1], is_end):
                return False
            self._ends_left.pop(0)
        if self.section is not None and not self._drops(self.section[1:], is_end):
            return False
        self._state = self._before
        return True


class DeepSeekV3Parser(HeadedParser):
    """The arguments are a block of code."""

    name = "deepseek_v3"
    aliases = ("deepseek_r1",)
    models = "DeepSeek V3, V3-0324, R1, R1-0528"
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    begin = "<｜tool▁call▁begin｜>"
    head = re.compile(r"function<｜tool▁sep｜>(?P<name>[\w.-]{1,256})\s{0,8}```json\s{0,8}(?=\{)")
    ends = ("```", "<｜tool▁call▁end｜>")
    markers = (*section, begin, "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
    cut_name = re.compile(r"<｜tool▁sep｜>([\w.-]*)([^\w.-]?)")

    @classmethod
    def fits(cls, template: str) -> bool:
        return cls.begin in template and "```json" in template

    @classmethod
    def rules(cls, tools: Sequence[ToolRule], marker: Marker, max_calls: int) -> list[str]:
        begin, separator, end = marker(cls.begin), marker("<｜tool▁sep｜>"), marker(cls.ends[1])
        calls = named_calls(
            tools, lambda name: f'{begin} "function" {separator} {quoted(name + chr(10) + "```json" + chr(10))}',
            f'"\\n```" {end}',
        )  # fmt: skip
        section = [marker(text) for text in cls.section or ()]
        return [f"start: {section[0]} {several('call', quoted(chr(10)), max_calls)} {section[1]}", *calls]


class DeepSeekV31Parser(HeadedParser):
    name = "deepseek_v31"
    models = "DeepSeek V3.1"
    section = DeepSeekV3Parser.section
    begin = DeepSeekV3Parser.begin
    head = re.compile(r"(?P<name>[\w.-]{1,256})<｜tool▁sep｜>\s{0,8}(?=\{)")
    ends = ("<｜tool▁call▁end｜>",)
    markers = DeepSeekV3Parser.markers
    cut_name = re.compile(r"<｜tool▁call▁begin｜>([\w.-]*)([^\w.-]?)")

    @classmethod
    def rules(cls, tools: Sequence[ToolRule], marker: Marker, max_calls: int) -> list[str]:
        begin, separator, end = marker(cls.begin), marker("<｜tool▁sep｜>"), marker(cls.ends[0])
        calls = named_calls(tools, lambda name: f"{begin} {quoted(name)} {separator}", end)
        section = [marker(text) for text in cls.section or ()]
        return [f"start: {section[0]} {several('call', '', max_calls)} {section[1]}", *calls]


class KimiK2Parser(HeadedParser):
    """The header is the call's id: functions.NAME:NUMBER."""

    name = "kimi_k2"
    models = "Kimi K2"
    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    begin = "<|tool_call_begin|>"
    head = re.compile(
        r"\s{0,8}(?P<id>(?:functions\.)?(?P<name>[\w.-]{1,256}):\d{1,6})\s{0,8}"
        r"<\|tool_call_argument_begin\|>\s{0,8}(?=\{)"
    )
    ends = ("<|tool_call_end|>",)
    markers = (*section, begin, "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    cut_name = re.compile(r"<\|tool_call_begin\|>functions\.([\w.-]*)([^\w.-]?)")

    @classmethod
    def rules(cls, tools: Sequence[ToolRule], marker: Marker, max_calls: int) -> list[str]:
        begin, separator, end = marker(cls.begin), marker("<|tool_call_argument_begin|>"), marker(cls.ends[0])
        calls = named_calls(
            tools, lambda name: f"{begin} {quoted(f'functions.{name}:')} /[0-9]{{1,3}}/ {separator}", end
        )
        section = [marker(text) for text in cls.section or ()]
        return [f"start: {section[0]} {several('call', '', max_calls)} {section[1]}", *calls]


class GptOssParser(HeadedParser):
    """A message of the commentary channel with a function as its recipient; see `reasoning.gpt_oss`."""

    name = "openai"
    aliases = ("gpt_oss", "openai_gptoss")
    models = "gpt-oss"
    begin = "<|channel|>"
    head = re.compile(
        r"(?:commentary|analysis) to=functions\.(?P<name>[\w.-]{1,256})[^{]{0,64}?<\|message\|>\s{0,8}(?=\{)"
    )
    ends = ("<|call|>",)
    markers = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|end|>")
    cut_name = re.compile(r"to=functions\.([\w.-]*)([^\w.-]?)")

    @classmethod
    def fits(cls, template: str) -> bool:
        return "<|channel|>" in template and "<|message|>" in template

    @classmethod
    def rules(cls, tools: Sequence[ToolRule], marker: Marker, max_calls: int) -> list[str]:
        """One call: the model ends its turn with each."""
        channel, constrain, message = marker("<|channel|>"), marker("<|constrain|>"), marker("<|message|>")
        analysis = f'{channel} "analysis" {message} /(.|\\n)*/ {marker("<|end|>")} {marker("<|start|>")} "assistant"'
        calls = named_calls(
            tools,
            lambda name: f'{channel} {quoted(f"commentary to=functions.{name} ")} {constrain} "json" {message}',
            "",
        )
        return [f"start: ({analysis})? call", *calls]
