"""The tools of a response in the form of a chat: functions only, as the server runs no tools itself."""

from __future__ import annotations

from typing import Any

from headrace.openai.errors import INVALID_TYPE, UNKNOWN, bad_request, not_supported
from headrace.openai.schema.chat import ChatRequest
from headrace.openai.schema.responses import ResponsesRequest

_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_MODES = ("auto", "required")


def tool_request(request: ResponsesRequest, response_format: dict[str, Any] | None) -> ChatRequest | None:
    """The tools as a chat request has them; None if there are none."""
    choice: Any = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools", "tool_choice")
        return None
    tools = [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools)]
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, tools = _allowed(choice, tools)
    elif isinstance(choice, dict):
        choice = _named(choice)
    return ChatRequest(
        messages=[],
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=response_format,
    )


def _chat_tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise not_supported(
            "tools", f"{place} has the type {kind!r}; the server runs no tools: only functions are supported"
        )
    for name, value in tool.items():
        if name not in ("type", *_FUNCTION_FIELDS) and value not in (None, False):
            raise bad_request(f"unknown parameter '{place}.{name}'", "tools", UNKNOWN)
    function = {name: tool[name] for name in _FUNCTION_FIELDS if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _named(choice: dict[str, Any]) -> dict[str, Any]:
    kind, name = choice.get("type"), choice.get("name")
    if kind != "function":
        raise not_supported(
            "tool_choice",
            f"tool_choice has the type {kind!r}; use 'none', 'auto', 'required', allowed_tools or a function",
        )
    return {"type": "function", "function": {"name": name}}


def _allowed(choice: dict[str, Any], tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """The mode, and the tools of the request that may be called; the others are not shown to the model."""
    mode, given = choice.get("mode", "auto"), choice.get("tools")
    if mode not in _MODES or not isinstance(given, list):
        raise bad_request(
            "tool_choice of type allowed_tools needs a mode (auto or required) and tools", "tool_choice", INVALID_TYPE
        )
    names = [tool.get("name") if isinstance(tool, dict) else None for tool in given]
    kept = [tool for tool in tools if tool["function"].get("name") in names]
    if len(kept) != len(set(names)) or not kept:
        raise bad_request("tool_choice.tools must name functions of tools, at least one", "tool_choice")
    return mode, kept
