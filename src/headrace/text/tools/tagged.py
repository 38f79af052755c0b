"""Calls with parameters between tags: <function=f><parameter=x>1</parameter></function> and the like."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Sequence
from typing import ClassVar

from headrace.text.tools.parser import Marker, ToolParser
from headrace.text.tools.rules import ToolRule, several, tagged_calls
from headrace.text.tools.xml_calls import TaggedCall, TagSyntax

MAX_HEAD_LEN = 512


class TaggedParser(ToolParser, ABC):
    """A block holds one call or several, each a header with the name, then parameters."""

    block: ClassVar[tuple[str, str]]
    head: ClassVar[re.Pattern[str]]  # the header of a call
    head_start: ClassVar[str]  # how it starts; empty: with the name
    syntax: ClassVar[TagSyntax]

    @classmethod
    def fits(cls, template: str) -> bool:
        return cls.block[0] in template and (cls.head_start or cls.syntax.open_start) in template

    def _before(self, is_end: bool) -> bool:
        begins = (self.block[0], self.head_start) if self.head_start else (self.block[0],)
        found = self._find(begins, is_end)
        if found is None:
            return False
        if found == self.head_start:  # models sometimes omit what opens the block
            self._unread = found + self._unread
        else:
            self._lead = found
        self._state = self._at_head
        return True

    def _at_head(self, is_end: bool) -> bool:
        if found := self.head.match(self._unread):
            self._skip(found.end())
            name = found["name"]
            self._begin(TaggedCall(name, self.syntax, self._types.get(name, {})))
        elif is_end or not self._may_be_head(self._unread.lstrip()):
            if not self._lead:
                self._skip(1)  # a header without its block: one character is enough to go on
            self._fail()
        else:
            return False
        return True

    def _may_be_head(self, rest: str) -> bool:
        if len(rest) > MAX_HEAD_LEN:
            return False
        start = self.head_start
        return start.startswith(rest) or (rest.startswith(start) and self._is_start_of_name(rest[len(start) :]))

    def _is_start_of_name(self, rest: str) -> bool:
        return "<" not in rest and ">" not in rest

    def _after_call(self, is_end: bool) -> bool:
        """Another call of the block may follow, or its end."""
        rest = self._unread.lstrip()
        start = self.head_start
        if start and rest.startswith(start):
            self._skip(len(self._unread) - len(rest))
            self._state = self._at_head
            return True
        if start and not is_end and start.startswith(rest):
            return False
        if not self._drops(self.block[1:], is_end):
            return False
        self._state = self._before
        return True


class Qwen3CoderParser(TaggedParser):
    name = "qwen3_coder"
    aliases: ClassVar[tuple[str, ...]] = ("qwen3_xml", "mimo")
    models = "Qwen3-Coder, Qwen3.5, Nemotron 3, MiMo"
    block = ("<tool_call>", "</tool_call>")
    head_start = "<function="
    head = re.compile(r"\s*<function=\s*(?P<name>[\w.-]{1,256})\s*>")
    syntax = TagSyntax(
        "<parameter=", re.compile(r"<parameter=(?P<key>[^<>]{1,256})>"), "</parameter>", "</function>", trims_lines=True
    )
    markers: ClassVar[tuple[str, ...]] = block
    cut_name = re.compile(r"<function=([\w.-]*)(>?)")

    @classmethod
    def rules(cls, tools: Sequence[ToolRule], marker: Marker, max_calls: int) -> list[str]:
        begin, end = (marker(text) for text in cls.block)
        calls = tagged_calls(
            tools,
            before=lambda name: f"<function={name}>\n",
            opened=lambda key: f"<parameter={key}>\n",
            close="\n</parameter>\n",
            after="</function>",
        )
        return [f"start: {several('block', '', max_calls)}", f'block: {begin} "\\n" call "\\n" {end} "\\n"?', *calls]


class SeedOssParser(Qwen3CoderParser):
    name = "seed_oss"
    aliases = ()
    models = "Seed-OSS"
    block = ("<seed:tool_call>", "</seed:tool_call>")
    markers = block


class Glm45Parser(TaggedParser):
    name = "glm45"
    aliases = ("glm47",)
    models = "GLM-4.5, 4.6, 4.7"
    block = ("<tool_call>", "</tool_call>")
    head_start = ""
    head = re.compile(r"\s*(?P<name>[\w.-]{1,256})\s*(?=<)")
    syntax = TagSyntax(
        "<arg_key>",
        re.compile(r"<arg_key>(?P<key>[^<]{1,256})</arg_key>\s{0,8}<arg_value>"),
        "</arg_value>",
        "</tool_call>",
    )
    markers = block
    cut_name = re.compile(r"<tool_call>([\w.-]*)([^\w.-]?)")

    @classmethod
    def rules(cls, tools: Sequence[ToolRule], marker: Marker, max_calls: int) -> list[str]:
        begin, end = (marker(text) for text in cls.block)
        calls = tagged_calls(
            tools,
            before=lambda name: f"{name}\n",
            opened=lambda key: f"<arg_key>{key}</arg_key>\n<arg_value>",
            close="</arg_value>\n",
            after="",
        )
        return [f"start: {several('block', '', max_calls)}", f'block: {begin} call {end} "\\n"?', *calls]

    def _is_start_of_name(self, rest: str) -> bool:
        return re.fullmatch(r"[\w.-]{0,256}\s*", rest) is not None

    def _after_call(self, is_end: bool) -> bool:
        self._state = self._before
        return True


class MiniMaxM2Parser(TaggedParser):
    name = "minimax_m2"
    models = "MiniMax M2"
    block = ("<minimax:tool_call>", "</minimax:tool_call>")
    head_start = "<invoke name="
    head = re.compile(r"\s*<invoke name=[\"']?(?P<name>[\w.-]{1,256})[\"']?\s*>")
    syntax = TagSyntax(
        "<parameter name=",
        re.compile(r"<parameter name=[\"']?(?P<key>[^<>\"']{1,256})[\"']?\s{0,8}>"),
        "</parameter>",
        "</invoke>",
    )
    markers = block
    cut_name = re.compile(r'<invoke name="([\w.-]*)("?)')

    @classmethod
    def rules(cls, tools: Sequence[ToolRule], marker: Marker, max_calls: int) -> list[str]:
        begin, end = (marker(text) for text in cls.block)
        calls = tagged_calls(
            tools,
            before=lambda name: f'<invoke name="{name}">\n',
            opened=lambda key: f'<parameter name="{key}">',
            close="</parameter>\n",
            after="</invoke>\n",
        )
        return [f'start: {begin} "\\n" {several("call", "", max_calls)} {end}', *calls]


class DeepSeekV32Parser(TaggedParser):
    """A parameter says whether its value is text."""

    name = "deepseek_v32"
    models = "DeepSeek V3.2"
    block = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
    head_start = "<｜DSML｜invoke name="
    head = re.compile(r"\s*<｜DSML｜invoke name=\"(?P<name>[\w.-]{1,256})\"\s*>")
    syntax = TagSyntax(
        "<｜DSML｜parameter name=",
        re.compile(
            r"<｜DSML｜parameter name=\"(?P<key>[^<>\"]{1,256})\"(?:\s{1,8}string=\"(?P<string>true|false)\")?\s{0,8}>"
        ),
        "</｜DSML｜parameter>",
        "</｜DSML｜invoke>",
    )
    markers = ("｜DSML｜",)
    cut_name = re.compile(r'<｜DSML｜invoke name="([\w.-]*)("?)')

    @classmethod
    def fits(cls, template: str) -> bool:
        return "DSML" in template

    @classmethod
    def rules(cls, tools: Sequence[ToolRule], marker: Marker, max_calls: int) -> list[str]:
        calls = tagged_calls(
            tools,
            before=lambda name: f'<｜DSML｜invoke name="{name}">\n',
            opened=lambda key: f'<｜DSML｜parameter name="{key}">',
            close="</｜DSML｜parameter>\n",
            after="</｜DSML｜invoke>\n",
        )
        begin, end = (f'"{text}"' for text in cls.block)
        return [f'start: {begin} "\\n" {several("call", "", max_calls)} {end}', *calls]
