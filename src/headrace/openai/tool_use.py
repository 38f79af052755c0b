"""Tools of a chat: what the template is given, the grammar of a forced call, and how calls are found in an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from headrace.openai.choices import members
from headrace.openai.errors import bad_request, not_supported
from headrace.openai.response_format import read_response_format
from headrace.openai.schema.chat import ChatRequest
from headrace.text import Tokenizer
from headrace.text.answer_parts import ContentDelta, Delta, ParsedAnswer, ToolCallDelta, put_together
from headrace.text.tool_calls import PARSERS, new_call_id, parser_for
from headrace.text.tools.calls import parameter_types
from headrace.text.tools.grammar import read_tools, tools_grammar
from headrace.text.tools.headed import GptOssParser
from headrace.text.tools.parser import ToolParser
from headrace.types import StructuredOutputs


class Message(NamedTuple):
    """The message of a choice."""

    content: str | None  # None if there are only calls
    finish_reason: str | None
    more: bytes  # further members of the message, as JSON


class ToolCalls(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="tools"):
    """How tool calls are found in the answers to one request."""

    parser_name: str
    names: tuple[str, ...]  # of the tools that can be called
    is_forced: bool = False  # the answer is calls and nothing else
    is_parallel: bool = True  # whether calls after the first are kept
    types: dict[str, dict[str, tuple[str, ...]]] = {}  # of the parameters of each tool

    def parser(self, *, whole_calls: bool = False) -> ToolParser:
        tools = {name: self.types.get(name, {}) for name in self.names}
        return parser_for(self.parser_name, tools, whole_calls=whole_calls)

    def read(self, parser: ToolParser, text: str, *, is_end: bool) -> list[Delta]:
        """The deltas of more text of an answer."""
        deltas = parser.push(text)
        if is_end:
            last = parser.finish()
            deltas += self._last_of_forced(last, parser.num_calls) if self.is_forced else last
        if self.is_parallel:
            return deltas
        return [delta for delta in deltas if not isinstance(delta, ToolCallDelta) or delta.index == 0]

    def _last_of_forced(self, deltas: list[Delta], num_calls: int) -> list[Delta]:
        """A forced call that max_tokens cut short stays a call, also before its arguments: there is nothing else that
        it can be. It is text only if its name is not known, and an answer that ended inside its reasoning has none."""
        text = "".join([delta.text for delta in deltas if isinstance(delta, ContentDelta)])
        calls: list[Delta] = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
        name = self._cut_name(text, is_first=not num_calls)
        if name is not None:
            return [*calls, ToolCallDelta(num_calls, new_call_id(), name)]
        return calls if num_calls else deltas

    def _cut_name(self, text: str, *, is_first: bool) -> str | None:
        found = PARSERS[self.parser_name].cut_name.search(text)
        if found is not None and found[2]:
            return found[1] if found[1] in self.names else None
        if not is_first or not text:
            return None
        possible = [name for name in self.names if name.startswith("" if found is None else found[1])]
        return possible[0] if len(possible) == 1 else None

    def message(self, text: str, finish_reason: str | None) -> Message:
        """The message of a whole answer. Calls that are cut short are text, unless they were forced."""
        parser = self.parser(whole_calls=not self.is_forced)
        return message_of(put_together(self.read(parser, text, is_end=True)), finish_reason)


def message_of(answer: ParsedAnswer, finish_reason: str | None) -> Message:
    """The message of an answer with its calls; its reasoning is left out."""
    if not answer.tool_calls:
        return Message(answer.content, finish_reason, b"")
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.tool_calls
    ]
    reason = "tool_calls" if finish_reason == "stop" else finish_reason
    return Message(answer.content or None, reason, members({"tool_calls": calls}))


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one request uses tools. Without `calls`, answers are text."""

    tools: list[dict[str, Any]] | None = None  # as the template sees them
    calls: ToolCalls | None = None
    constraint: StructuredOutputs | None = None
    shows_special_tokens: bool = False  # the marker of a call is a special token

    @property
    def params(self) -> dict[str, Any]:
        """Sampling parameters that replace those of the request."""
        more: dict[str, Any] = {}
        if self.constraint is not None:
            more["structured_outputs"] = self.constraint
        if self.shows_special_tokens:
            more["skip_special_tokens"] = False
        return more


NO_TOOLS = ToolUse()


def read_tool_use(
    request: ChatRequest, tokenizer: Tokenizer, *, parser_name: str = "auto", allows_auto: bool = True
) -> ToolUse:
    """Reads the fields of a request with tools. `parser_name`: "auto" chooses by the model's template."""
    choice = request.tool_choice
    schemas = read_tools(request.tools)
    names = tuple(schemas)
    if choice == "none":
        return NO_TOOLS
    if choice in (None, "auto"):
        _check_auto(request, tokenizer, allows_auto=allows_auto)
    elif isinstance(choice, str) and choice != "required":
        raise bad_request(f"tool_choice must be none, auto, required or a function, got {choice[:40]!r}", "tool_choice")
    elif request.structured_outputs is not None:
        raise bad_request("a forced tool call excludes structured_outputs", "tool_choice")
    parser = parser_for(template_of(tokenizer) if parser_name == "auto" else parser_name)
    is_parallel = request.parallel_tool_calls is not False
    is_forced = choice not in (None, "auto")
    answer = None if is_forced else _answer_schema(request, parser)
    constraint = None
    if is_forced or answer is not None:
        constraint = tools_grammar(
            request.tools or [],
            choice if is_forced and choice is not None else "required",
            parser,
            tokenizer=tokenizer,
            parallel_tool_calls=is_parallel,
            answer=answer,
        )
    if isinstance(choice, dict):
        names = (choice["function"]["name"],)  # `tools_grammar` has checked it
    return ToolUse(
        request.tools,
        ToolCalls(
            parser.name,
            names,
            is_forced,
            is_parallel,
            {name: parameter_types(schemas[name]) for name in names},
        ),
        constraint,
        any(tokenizer.special_id(marker) is not None for marker in parser.markers),
    )


def _check_auto(request: ChatRequest, tokenizer: Tokenizer, *, allows_auto: bool) -> None:
    if not allows_auto:
        raise not_supported(
            "tool_choice", "tool_choice 'auto' is disabled on this server; use 'required', 'none' or a function"
        )
    if request.structured_outputs is not None:
        raise bad_request(
            "an answer under structured_outputs cannot call tools; use response_format, or set tool_choice to 'none'",
            "tools",
        )
    if tokenizer.chat_template is not None and "tools" not in tokenizer.chat_template.variables:
        raise not_supported(
            "tools",
            "the model's chat template has no place for tools, so the model would not see them; leave out tools, force "
            "a call with tool_choice, or use a model that was trained to call tools",
        )


def _answer_schema(request: ChatRequest, parser: ToolParser) -> Mapping[str, Any] | None:
    """The JSON schema of an answer that calls no tool; None: any text."""
    form = read_response_format(request.response_format)
    if form is None:
        return None
    if isinstance(parser, GptOssParser):
        raise bad_request("response_format cannot be given with tools for gpt-oss models; leave one out", "tools")
    schema: Mapping[str, Any] = msgspec.json.decode(form.source)
    return schema


def template_of(tokenizer: Tokenizer) -> str | None:
    """The chat template that parsers are chosen by."""
    templates: Mapping[str, str] = {} if tokenizer.chat_template is None else tokenizer.chat_template.templates
    return templates.get("tool_use") or templates.get("default")


def delta_object(delta: ToolCallDelta) -> dict[str, Any]:
    """The start of a call, or more of its arguments, as in a chunk."""
    function: dict[str, Any] = {"arguments": delta.arguments}
    if delta.name is None:
        return {"index": delta.index, "function": function}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": {"name": delta.name, **function}}
