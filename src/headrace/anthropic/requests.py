"""A request for a message as a chat request."""

from __future__ import annotations

from typing import Any

from headrace.anthropic.conversation import chat_messages
from headrace.anthropic.schema import HINTS, UNSUPPORTED, CountTokensRequest, MessagesRequest
from headrace.openai.body import read
from headrace.openai.errors import INVALID_TYPE, UNKNOWN, bad_request, not_supported
from headrace.openai.fields import note_ignored
from headrace.openai.prompts import template_variables
from headrace.openai.schema.chat import ChatRequest

VERSIONS = (b"2023-06-01", b"2026-10-21")  # the later one only refuses what the earlier one takes
VERSION_HEADER = b"anthropic-version"

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TOOL_FIELDS = frozenset({"type", "name", "description", "input_schema", "strict"})
# How the client wants a tool to be offered or its input to be sent. Without them, tools are offered at once.
_TOOL_HINTS = frozenset(
    {"allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "input_examples"}
)
_THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
_COPIED = ("temperature", "top_p", "top_k", "seed", "ignore_eos", "stream", "cache_salt", "request_id", "max_tokens")


def check_version(given: bytes | None) -> None:
    """The header may be left out."""
    if given is not None and given not in VERSIONS:
        known = " or ".join(version.decode() for version in VERSIONS)
        raise bad_request(f"anthropic-version must be {known}", "anthropic-version")


def read_request(body: bytes) -> MessagesRequest:
    return read(MessagesRequest, body, unsupported=UNSUPPORTED, hints=HINTS)


def read_count_request(body: bytes) -> CountTokensRequest:
    return read(CountTokensRequest, body, unsupported=UNSUPPORTED, hints=HINTS)


def as_chat(request: CountTokensRequest) -> ChatRequest:
    """The same as a chat request, for the checks that all chats share."""
    chat = ChatRequest(
        messages=chat_messages(request.system, request.messages),
        tools=[_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())] or None,
        response_format=_response_format(request),
    )
    choice = request.tool_choice or {}
    chat.tool_choice = _tool_choice(choice)
    chat.parallel_tool_calls = not choice.get("disable_parallel_tool_use", False)
    if isinstance(request, MessagesRequest):
        for name in _COPIED:
            setattr(chat, name, getattr(request, name))
        chat.stop = request.stop_sequences or None
    return chat


def template_settings(request: CountTokensRequest) -> dict[str, Any]:
    """The variables of the chat template that the request sets. One that the template does not read is ignored, if it
    is about thinking."""
    variables = template_variables(request.chat_template_kwargs, (request.output_config or {}).get("effort"))
    kind = (request.thinking or {}).get("type")
    if request.thinking is None:
        return variables
    if kind not in _THINKING:
        raise bad_request(f"thinking.type must be {', '.join(_THINKING)}, got {kind!r}", "thinking")
    return {"enable_thinking": _THINKING[kind], **variables}


def _chat_tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise not_supported(
            "tools",
            f"{place} has the type {kind!r}; only tools with an input_schema of their own are supported, as the server "
            "runs no tools and the model does not know those of Anthropic",
        )
    for name, value in tool.items():
        if name in _TOOL_HINTS:
            note_ignored(f"tools.{name}")
        elif name not in _TOOL_FIELDS and value is not None:
            raise bad_request(f"unknown parameter '{place}.{name}'", "tools", UNKNOWN)
    if not isinstance(tool.get("input_schema"), dict):
        raise bad_request(f"{place}.input_schema must be a JSON schema", "tools", INVALID_TYPE)
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any]) -> str | dict[str, Any] | None:
    kind = choice.get("type", "auto") if choice else None
    if kind is None:
        return None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in _CHOICES:
        raise bad_request(f"tool_choice.type must be auto, any, tool or none, got {kind!r}", "tool_choice")
    return _CHOICES[kind]


def _response_format(request: CountTokensRequest) -> dict[str, Any] | None:
    """`output_config.format`, or its older name `output_format`."""
    config = request.output_config or {}
    for name in config:
        if name not in ("effort", "format"):
            raise bad_request(f"unknown parameter 'output_config.{name}'", "output_config", UNKNOWN)
    given = config.get("format") or request.output_format
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        raise bad_request("output_config.format must be an object of type json_schema", "output_config", INVALID_TYPE)
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given.get("schema")}}
