"""How the parts of an answer to a chat are found: from a request and its prompt to a reader of the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.openai.schema.chat import ChatRequest
from headrace.openai.tool_use import NO_TOOLS, ToolCalls, ToolUse, read_tool_use
from headrace.text import Tokenizer
from headrace.text.answer_parts import ContentDelta, Delta
from headrace.text.tool_calls import ToolParser
from headrace.types import SamplingParams


class AnswerReader:
    """Reads one answer as it arrives."""

    def __init__(self, calls: ToolCalls | None, parser: ToolParser | None) -> None:
        self._calls = calls
        self._parser = parser

    def read(self, text: str, *, is_end: bool = False) -> list[Delta]:
        """Returns the deltas of more text; at the end also what was held back."""
        if self._calls is None or self._parser is None:
            return [ContentDelta(text)] if text else []
        return [*self._calls.read(self._parser, text, is_end=is_end)]


class AnswerFormat(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="answer"):
    """How the parts of the answers to one request are found."""

    calls: ToolCalls | None = None

    def reader(self, *, whole_calls: bool = False) -> AnswerReader:
        return AnswerReader(self.calls, None if self.calls is None else self.calls.parser(whole_calls=whole_calls))


@dataclass(frozen=True, slots=True)
class AnswerUse:
    """How one request uses tools, before its prompt is known."""

    tool_use: ToolUse = NO_TOOLS

    @property
    def params(self) -> dict[str, Any]:
        """Sampling parameters that replace those of the request."""
        return self.tool_use.params

    def is_inside(self, prompt: str | None, continued: str | None = None) -> bool | None:
        """Whether a prompt ends inside the reasoning; None: it says nothing."""
        return None

    def format(self, is_inside: bool | None) -> AnswerFormat | None:
        """None: the answer is text."""
        return None if self.tool_use.calls is None else AnswerFormat(self.tool_use.calls)

    def constrained(self, params: SamplingParams, is_inside: bool | None, tokenizer: Tokenizer) -> SamplingParams:
        """The parameters with a grammar that starts after the reasoning."""
        return params


NO_PARSERS = AnswerUse()


def read_answer_use(
    request: ChatRequest, tokenizer: Tokenizer, *, parser_name: str = "auto", allows_auto: bool = True
) -> AnswerUse:
    """Reads the fields of a request that decide how its answer is parsed."""
    if not request.tools:
        return NO_PARSERS
    return AnswerUse(read_tool_use(request, tokenizer, parser_name=parser_name, allows_auto=allows_auto))
