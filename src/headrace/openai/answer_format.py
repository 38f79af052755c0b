"""The parts of an answer to a chat: which parsers find them, and the message that they make.

request, tokenizer ─▶ `read_answer_use` ─▶ prompt ─▶ `AnswerUse.format` ─▶ `AnswerFormat.reader` ─▶ deltas
                                             └─▶ `AnswerUse.constrained`: a grammar starts after the reasoning
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from headrace.openai.choices import members
from headrace.openai.errors import bad_request
from headrace.openai.parser_names import ParserNames
from headrace.openai.schema.chat import ChatRequest
from headrace.openai.tool_use import NO_TOOLS, ToolCalls, ToolUse, message_of, read_tool_use, template_of
from headrace.text import Tokenizer
from headrace.text.answer_parts import Delta, put_together
from headrace.text.answer_reader import AnswerReader
from headrace.text.reasoning.formats import reasoning_format
from headrace.text.reasoning.gpt_oss import GptOssParser
from headrace.text.reasoning.parser import ReasoningParser
from headrace.text.tools.parser import ToolParser
from headrace.types import ReasoningSpan, SamplingParams, StructuredOutputs

BUDGET = "thinking_token_budget"


class AnswerMessage(NamedTuple):
    """The message of a choice."""

    content: str | None  # None if there are only calls or only reasoning
    finish_reason: str | None
    more: bytes  # further members of the message, as JSON
    reasoning: str  # also if it is not shown


class AnswerFormat(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="answer"):
    """How the parts of the answers to one request are found."""

    calls: ToolCalls | None = None
    reasoning: str | None = None  # the name of its format
    is_inside: bool | None = None  # whether the prompt ended inside the reasoning; None: it says nothing
    shows_reasoning: bool = True

    @property
    def hides_reasoning(self) -> bool:
        """Whether tokens and log-probabilities are left out, since they would show the reasoning."""
        return self.reasoning is not None and not self.shows_reasoning

    def reader(self, *, whole_calls: bool = False) -> AnswerReader:
        """A reader of one answer."""
        tools = None if self.calls is None else self.calls.parser(whole_calls=whole_calls)
        return AnswerReader(self._reasoning_parser(tools), tools, self._read_calls)

    def message(self, text: str, finish_reason: str | None) -> AnswerMessage:
        """The message of a whole answer."""
        answer = put_together(self._whole(text))
        message = message_of(answer, finish_reason)
        content = message.content
        if self.reasoning is None:
            return AnswerMessage(content, message.finish_reason, message.more, "")
        shown = answer.reasoning if self.shows_reasoning and answer.reasoning else None
        if answer.reasoning and not content:
            content = None
        more = members({"reasoning": shown, "reasoning_content": shown}) + message.more
        return AnswerMessage(content, message.finish_reason, more, answer.reasoning)

    def _whole(self, text: str) -> list[Delta]:
        is_forced = self.calls is not None and self.calls.is_forced
        return self.reader(whole_calls=not is_forced).read(text, is_end=True)

    def _reasoning_parser(self, tools: ToolParser | None) -> ReasoningParser | None:
        kind = None if self.reasoning is None else reasoning_format(self.reasoning, None)
        if kind is None:
            return None
        return kind(is_inside=self.is_inside, call_markers=() if tools is None else tools.markers[:1])

    def _read_calls(self, parser: ToolParser, text: str, is_end: bool) -> list[Delta]:
        assert self.calls is not None
        return self.calls.read(parser, text, is_end=is_end)


@dataclass(frozen=True, slots=True)
class AnswerUse:
    """How one request uses tools and reasoning, before its prompt is known."""

    tool_use: ToolUse = NO_TOOLS
    reasoning: type[ReasoningParser] | None = None
    shows_reasoning: bool = True
    shows_special_tokens: bool = False  # a marker of the reasoning is a special token
    max_reasoning_tokens: int | None = None

    @property
    def params(self) -> dict[str, Any]:
        """Sampling parameters that replace those of the request."""
        more = self.tool_use.params
        return {**more, "skip_special_tokens": False} if self.shows_special_tokens else more

    def is_inside(self, prompt: str | None, continued: str | None = None) -> bool | None:
        """Whether a prompt ends inside the reasoning. `continued`: the message that the answer continues."""
        if self.reasoning is None or prompt is None:
            return None
        found = self.reasoning.state_after(prompt)
        if found is not None or not continued:
            return found
        start, end = (_last(continued, tags) for tags in (self.reasoning.starts(), self.reasoning.ends()))
        return start > end

    def format(self, is_inside: bool | None) -> AnswerFormat | None:
        """None: the answer is text."""
        if self.reasoning is None and self.tool_use.calls is None:
            return None
        name = None if self.reasoning is None else self.reasoning.name
        return AnswerFormat(self.tool_use.calls, name, is_inside, self.shows_reasoning)

    def constrained(self, params: SamplingParams, is_inside: bool | None, tokenizer: Tokenizer) -> SamplingParams:
        """The parameters with a grammar that starts after the reasoning, and with the limit of the reasoning."""
        outputs = params.structured_outputs
        if self.reasoning is None or (outputs is None and self.max_reasoning_tokens is None):
            return params
        if self.reasoning is GptOssParser and self.tool_use.constraint is not None:
            return params  # the grammar of a call has the analysis before it
        span = _span(self.reasoning, is_inside, tokenizer)
        if span is None:
            return params
        if self.max_reasoning_tokens is not None:
            end = tuple(tokenizer.encode(self.reasoning.ends()[0], add_special_tokens=False))
            span = replace(span, max_tokens=self.max_reasoning_tokens, end_token_ids=end)
        if isinstance(outputs, StructuredOutputs):
            return replace(params, structured_outputs=replace(outputs, reasoning=span))
        return replace(params, structured_outputs=StructuredOutputs(reasoning=span))


NO_PARSERS = AnswerUse()


def read_answer_use(
    request: ChatRequest, tokenizer: Tokenizer, names: ParserNames, *, allows_auto: bool = True
) -> AnswerUse:
    """Reads the fields of a request that decide how its answer is parsed."""
    tool_use = NO_TOOLS
    if request.tools:
        tool_use = read_tool_use(request, tokenizer, parser_name=names.tool_call, allows_auto=allows_auto)
    kind = reasoning_format(names.reasoning, template_of(tokenizer))
    budget = _max_reasoning_tokens(request.thinking_token_budget, kind, tokenizer)
    if kind is None:
        return AnswerUse(tool_use)
    is_special = any(tokenizer.special_id(marker) is not None for marker in kind.markers)
    return AnswerUse(tool_use, kind, request.include_reasoning is not False, is_special, budget)


def _max_reasoning_tokens(asked: int | None, kind: type[ReasoningParser] | None, tokenizer: Tokenizer) -> int | None:
    """Reads `thinking_token_budget`: -1 is no limit, as in vLLM."""
    if asked is None or asked == -1:
        return None
    if asked < 0:
        raise bad_request(f"thinking_token_budget must be at least 0, or -1 for no limit, got {asked}", BUDGET)
    if kind is None:
        raise bad_request(
            "thinking_token_budget needs a format of reasoning, and none is known for this model: start with "
            "--reasoning-parser, or leave it out",
            BUDGET,
        )
    can_start = kind.starts_inside or tokenizer.single_id(kind.starts()[0]) is not None
    if kind is GptOssParser or not can_start:
        raise bad_request(f"thinking_token_budget is not supported for reasoning of the format {kind.name}", BUDGET)
    return asked


def _span(kind: type[ReasoningParser], is_inside: bool | None, tokenizer: Tokenizer) -> ReasoningSpan | None:
    """None: the grammar starts with the answer. So it does where reasoning would start with several tokens."""
    if is_inside or (is_inside is None and kind.starts_inside):
        return ReasoningSpan(kind.ends())
    if is_inside is False:
        return None
    start = tokenizer.single_id(kind.starts()[0])
    return None if start is None else ReasoningSpan(kind.ends(), start)


def _last(text: str, tags: Sequence[str]) -> int:
    return max(text.rfind(tag) for tag in tags)


def num_reasoning_tokens(reasoning: str, tokenizer: Tokenizer | None) -> int:
    """How many tokens the text of the reasoning has when it is tokenized again."""
    if not reasoning or tokenizer is None:
        return 0
    return len(tokenizer.encode(reasoning, add_special_tokens=False))
