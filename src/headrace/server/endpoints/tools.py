"""Tools of a chat: what the template is told, what the answer is held to, and how calls are found in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.server.endpoints.schema.chat import ChatRequest
from headrace.server.http.errors import bad_request, not_supported
from headrace.server.services import Services
from headrace.text import Tokenizer
from headrace.text.tool_calls import ContentDelta, Delta, ToolCallDelta, ToolParser, parser_for, put_together
from headrace.text.tool_grammar import read_tools, tools_grammar
from headrace.types import StructuredOutputs


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one request uses tools. Without any, answers are text."""

    tools: list[dict[str, Any]] | None = None  # as the template sees them
    names: tuple[str, ...] = ()
    form: str | None = None  # a parser's name, or the template that shows its calls
    constraint: StructuredOutputs | None = None
    is_parallel: bool = True  # whether more than the first call is given
    shows_special_tokens: bool = False  # a marker of calls is one

    @property
    def finds_calls(self) -> bool:
        return self.tools is not None

    def parser(self, *, whole_calls: bool = False) -> ToolParser:
        return parser_for(self.form, self.names, whole_calls=whole_calls)

    def given(self, deltas: list[Delta]) -> list[Delta]:
        """The deltas without those of calls beyond the first, if only one is wanted."""
        if self.is_parallel:
            return deltas
        return [delta for delta in deltas if isinstance(delta, ContentDelta) or delta.index == 0]

    def message(self, text: str) -> tuple[str | None, list[dict[str, Any]]]:
        """A whole answer's text, None if it is all calls, and its calls."""
        parser = self.parser(whole_calls=True)
        parsed = put_together(self.given([*parser.push(text), *parser.finish()]))
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in parsed.tool_calls
        ]
        return (parsed.content or None if calls else parsed.content), calls


def read_tool_use(request: ChatRequest, services: Services) -> ToolUse:
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools", "tool_choice")
        return ToolUse()
    names = tuple(read_tools(request.tools))
    if choice == "none":
        return ToolUse()
    if choice in (None, "auto"):
        return _auto(request, services, names)
    if isinstance(choice, str) and choice != "required":
        raise bad_request(f"tool_choice must be none, auto, required or a function, got {choice[:40]!r}", "tool_choice")
    if request.response_format is not None or request.structured_outputs is not None:
        raise bad_request("a forced tool call leaves no room for another form of the answer", "tool_choice")
    tokenizer = services.engine.get_tokenizer()
    form = _form(services, tokenizer)
    is_parallel = request.parallel_tool_calls is not False
    return ToolUse(
        request.tools,
        names,
        form,
        tools_grammar(request.tools, choice or "", form, tokenizer=tokenizer, parallel_tool_calls=is_parallel),
        is_parallel,
        _has_special_marker(form, tokenizer),
    )


def _auto(request: ChatRequest, services: Services, names: tuple[str, ...]) -> ToolUse:
    if not services.options.enable_auto_tool_choice:
        raise not_supported(
            "tool_choice", "tool_choice 'auto' is switched off here; use 'required', 'none' or a function"
        )
    if request.structured_outputs is not None or (request.response_format or {}).get("type", "text") != "text":
        raise bad_request(
            "an answer of a given form cannot call tools; set tool_choice to 'none', or leave the form out", "tools"
        )
    tokenizer = services.engine.get_tokenizer()
    form = _form(services, tokenizer)
    is_parallel = request.parallel_tool_calls is not False
    return ToolUse(request.tools, names, form, None, is_parallel, _has_special_marker(form, tokenizer))


def _form(services: Services, tokenizer: Tokenizer) -> str | None:
    """The parser that was configured, or the template, by which it is chosen."""
    name = services.options.tool_call_parser
    if name != "auto":
        return name
    templates: Mapping[str, str] = {} if tokenizer.chat_template is None else tokenizer.chat_template.templates
    return templates.get("tool_use") or templates.get("default")


def _has_special_marker(form: str | None, tokenizer: Tokenizer) -> bool:
    return any(tokenizer.special_id(marker) is not None for marker in parser_for(form).markers)


def delta_object(delta: ToolCallDelta) -> dict[str, Any]:
    """A call's beginning, or more of its arguments, as a chunk has it."""
    function: dict[str, Any] = {"arguments": delta.arguments}
    if delta.name is None:
        return {"index": delta.index, "function": function}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": {"name": delta.name, **function}}
