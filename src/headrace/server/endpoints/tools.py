"""Tools of a chat: what the template is given, the grammar of a forced call, and the parser that finds calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.openai.errors import bad_request, not_supported
from headrace.openai.schema.chat import ChatRequest
from headrace.server.services import Services
from headrace.text import Tokenizer
from headrace.text.tool_calls import ContentDelta, Delta, ToolCallDelta, ToolParser, parser_for, put_together
from headrace.text.tool_grammar import read_tools, tools_grammar
from headrace.types import StructuredOutputs


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one request uses tools. Without tools, answers are text."""

    tools: list[dict[str, Any]] | None = None  # as the template sees them
    names: tuple[str, ...] = ()
    form: str | None = None  # a parser's name, or the template that shows its calls
    constraint: StructuredOutputs | None = None
    is_parallel: bool = True  # whether calls after the first are kept
    shows_special_tokens: bool = False  # the marker of a call is a special token

    @property
    def finds_calls(self) -> bool:
        return self.tools is not None

    def parser(self, *, whole_calls: bool = False) -> ToolParser:
        return parser_for(self.form, self.names, whole_calls=whole_calls)

    def given(self, deltas: list[Delta]) -> list[Delta]:
        """The deltas without calls after the first, if only one is wanted."""
        if self.is_parallel:
            return deltas
        return [delta for delta in deltas if isinstance(delta, ContentDelta) or delta.index == 0]

    def message(self, text: str) -> tuple[str | None, list[dict[str, Any]]]:
        """An answer's text (None if there are only calls) and its calls.

        A forced call that max_tokens cut short stays a call, as in a stream: there is nothing else that it can be.
        """
        parser = self.parser(whole_calls=self.constraint is None)
        parsed = put_together(self.given([*parser.push(text), *parser.finish()]))
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in parsed.tool_calls
        ]
        return (parsed.content or None if calls else parsed.content), calls


def read_tool_use(request: ChatRequest, services: Services) -> ToolUse:
    choice = request.tool_choice
    if not request.tools:
        return ToolUse()  # `chat_params` refuses a tool_choice without tools
    names = tuple(read_tools(request.tools))
    if choice == "none":
        return ToolUse()
    if choice in (None, "auto"):
        return _auto(request, services, names)
    if isinstance(choice, str) and choice != "required":
        raise bad_request(f"tool_choice must be none, auto, required or a function, got {choice[:40]!r}", "tool_choice")
    if request.response_format is not None or request.structured_outputs is not None:
        raise bad_request("a forced tool call excludes response_format and structured_outputs", "tool_choice")
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
            "tool_choice", "tool_choice 'auto' is disabled on this server; use 'required', 'none' or a function"
        )
    if request.structured_outputs is not None or (request.response_format or {}).get("type", "text") != "text":
        raise bad_request(
            "a constrained answer cannot call tools; set tool_choice to 'none', or leave out the format",
            "tools",
        )
    tokenizer = services.engine.get_tokenizer()
    if tokenizer.chat_template is not None and "tools" not in tokenizer.chat_template.variables:
        raise not_supported(
            "tools",
            "the model's chat template has no place for tools, so the model would not see them; leave out tools, force "
            "a call with tool_choice, or use a model that was trained to call tools",
        )
    form = _form(services, tokenizer)
    is_parallel = request.parallel_tool_calls is not False
    return ToolUse(request.tools, names, form, None, is_parallel, _has_special_marker(form, tokenizer))


def _form(services: Services, tokenizer: Tokenizer) -> str | None:
    """The name of the configured parser, or the template that the parser is chosen by."""
    name = services.options.tool_call_parser
    if name != "auto":
        return name
    templates: Mapping[str, str] = {} if tokenizer.chat_template is None else tokenizer.chat_template.templates
    return templates.get("tool_use") or templates.get("default")


def _has_special_marker(form: str | None, tokenizer: Tokenizer) -> bool:
    return any(tokenizer.special_id(marker) is not None for marker in parser_for(form).markers)


def delta_object(delta: ToolCallDelta) -> dict[str, Any]:
    """The start of a call, or more of its arguments, as in a chunk."""
    function: dict[str, Any] = {"arguments": delta.arguments}
    if delta.name is None:
        return {"index": delta.index, "function": function}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": {"name": delta.name, **function}}
