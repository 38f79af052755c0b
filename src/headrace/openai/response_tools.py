"""The tools of a response in the form of a chat: functions only, as the server runs no tools itself."""

from __future__ import annotations

from typing import Any

from headrace.openai.errors import INVALID_TYPE, UNKNOWN, bad_request, not_supported
from headrace.openai.schema.chat import ChatRequest
from headrace.openai.schema.responses import ResponsesRequest

_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_MODES = ("auto", "required")


def chat_request(request: ResponsesRequest, response_format: dict[str, Any] | None) -> ChatRequest:
    """The tools as a chat request has them."""
    choice: Any = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools", "tool_choice")
        return ChatRequest(messages=[], response_format=response_format)
    tools = [one for index, tool in enumerate(request.tools) for one in _chat_tools(tool, f"tools[{index}]")]
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
        structured_outputs=request.structured_outputs,
    )


def full_name(name: str, namespace: str | None) -> str:
    """The name of a function for the model."""
    return name if namespace is None else f"{namespace}.{name}"


def called(name: str, tools: list[dict[str, Any]]) -> dict[str, str]:
    """The members of a call that say what is called, from the name that the model gave."""
    namespace, separator, inner = name.partition(".")
    if separator and any(tool.get("type") == "namespace" and tool.get("name") == namespace for tool in tools):
        return {"namespace": namespace, "name": inner}
    return {"name": name}


def _chat_tools(tool: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """One function, or those of a namespace."""
    if tool.get("type") != "namespace":
        return [_chat_tool(tool, place)]
    namespace, inner = tool.get("name"), tool.get("tools")
    if not isinstance(namespace, str) or not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
        raise bad_request(f"{place} of type namespace needs a name and tools", "tools", INVALID_TYPE)
    found = [_chat_tool(one, f"{place}.tools[{index}]") for index, one in enumerate(inner)]
    for one in found:
        one["function"]["name"] = full_name(str(one["function"].get("name")), namespace)
    return found


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
