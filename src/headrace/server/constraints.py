"""What form an answer must have: response_format, structured_outputs and tools, as the engine takes them."""

from __future__ import annotations

from typing import Any

import headrace.types
from headrace.errors import RequestError
from headrace.server.errors import bad_request, not_supported
from headrace.server.schema.chat import ChatRequest
from headrace.server.schema.common import SamplingFields

_StructuredOutputs: Any = getattr(headrace.types, "StructuredOutputs", None)


def structured_outputs(request: SamplingFields) -> dict[str, Any]:
    """The engine's keyword argument, or nothing if any text will do."""
    of_format = _of_response_format(request.response_format)
    if request.structured_outputs is not None:
        if of_format is not None:
            raise bad_request("response_format and structured_outputs exclude each other", "structured_outputs")
        of_format = request.structured_outputs
        name = "structured_outputs"
    else:
        name = "response_format"
    return {} if of_format is None else _constraint(of_format, name)


def _constraint(given: dict[str, Any], name: str) -> dict[str, Any]:
    if _StructuredOutputs is None:
        raise not_supported(name, f"{name} is not supported; leave it out")
    try:
        return {"structured_outputs": _StructuredOutputs(**{**given, "asked_as": name})}
    except (RequestError, TypeError) as error:
        raise bad_request(str(error), name) from None


def _of_response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            schema = given.get("json_schema")
            if not isinstance(schema, dict) or not isinstance(schema.get("schema"), (dict, bool)):
                raise bad_request("response_format.json_schema must have a schema", "response_format.json_schema")
            return {"json": schema["schema"]}
        case other:
            raise bad_request(
                f"response_format.type must be text, json_object or json_schema, got {other!r}", "response_format.type"
            )


def refuse_tools(request: ChatRequest) -> None:
    if request.tools and request.tool_choice != "none":
        raise not_supported("tools", "tools are not supported; leave them out")
    if request.tool_choice not in (None, "none", "auto"):
        raise not_supported("tool_choice", "tool_choice needs tools, which are not supported; leave it out")
