"""Reads one answer as it arrives: its reasoning, its text and its tool calls, in this order of parsing."""

from __future__ import annotations

from collections.abc import Callable

from headrace.text.answer_parts import ContentDelta, Delta
from headrace.text.reasoning.parser import ReasoningParser
from headrace.text.tools.parser import ToolParser

ReadCalls = Callable[[ToolParser, str, bool], list[Delta]]


class AnswerReader:
    """A reasoning parser and a tool parser, one after the other; either may be missing."""

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolParser | None, read_calls: ReadCalls | None = None
    ) -> None:
        """`read_calls`: how the tool parser is fed with text; the last argument tells whether it is the end."""
        self._reasoning = reasoning
        self._tools = tools
        self._read_calls = read_calls or _read_calls

    def read(self, text: str, *, is_end: bool = False) -> list[Delta]:
        """Returns the deltas of more text; at the end also what was held back."""
        deltas: list[Delta] = [ContentDelta(text)] if text else []
        if self._reasoning is not None:
            deltas = self._reasoning.push(text)
            if is_end:
                deltas += self._reasoning.finish()
        if self._tools is None:
            return deltas
        read: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                read += self._read_calls(self._tools, delta.text, False)
            else:
                read.append(delta)
        return read + self._read_calls(self._tools, "", True) if is_end else read


def _read_calls(parser: ToolParser, text: str, is_end: bool) -> list[Delta]:
    return parser.push(text) + (parser.finish() if is_end else [])
