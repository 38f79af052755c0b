"""The grammar of an answer that must call a tool: in the model's own format, with arguments that match the schema."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import RequestError, nearest
from headrace.text.closed_schemas import closed
from headrace.text.tokenizer import Tokenizer
from headrace.text.tool_calls import ToolParser, parser_for
from headrace.text.tools.rules import ToolRule, json_rule, quoted
from headrace.types import StructuredOutputs

MAX_TOOLS = 128
MAX_CALLS = 16  # in one answer
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def tools_grammar(
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any],
    parser: ToolParser | str | None,
    *,
    tokenizer: Tokenizer | None = None,
    parallel_tool_calls: bool = True,
    answer: Mapping[str, Any] | None = None,
) -> StructuredOutputs:
    """Returns the grammar for a `tool_choice`: "required" asks for one or more calls, an object for one of that name.

    `tools` have OpenAI's format. With the model's `tokenizer`, markers that are special tokens are written as such.
    `answer` is a JSON schema: the model may write such a text instead of calls.
    """
    schemas = read_tools(tools)
    name = _chosen(tool_choice, schemas)
    if name is not None:
        schemas = {name: schemas[name]}
    max_calls = MAX_CALLS if parallel_tool_calls and name is None else 1
    kind = parser if isinstance(parser, ToolParser) else parser_for(parser)
    rules = [ToolRule(i, name, _closed(name, schema)) for i, (name, schema) in enumerate(schemas.items())]
    lines = kind.rules(rules, lambda text: _marker(text, tokenizer), max_calls)
    if answer is not None:
        lines = _or_answer(lines, answer)
    return StructuredOutputs(grammar="\n".join(lines), asked_as="tools")


def read_tools(tools: object) -> dict[str, Mapping[str, Any]]:
    """Returns each function's name and the JSON schema of its arguments; refuses what is not in OpenAI's format."""
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        raise _refused("must be a list of at least one tool")
    if len(tools) > MAX_TOOLS:
        raise _refused(f"can be at most {MAX_TOOLS}, got {len(tools)}")
    schemas: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise _refused(f"[{index}] must be an object with type 'function' and a function")
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise _refused(f"[{index}].function.name must be up to 64 letters, digits, '_', '-' and '.', got {name!r}")
        if name in schemas:
            raise _refused(f"[{index}].function.name is {name!r} again; names must be unique")
        if not isinstance(schema, Mapping | None):
            raise _refused(f"[{index}].function.parameters must be a JSON schema, got {type(schema).__name__}")
        schemas[name] = _NO_ARGUMENTS if schema is None else schema
    return schemas


def _or_answer(lines: Sequence[str], schema: Mapping[str, Any]) -> list[str]:
    """The rules of calls, with a JSON text as the other way to answer."""
    start, *others = lines
    calls = start.removeprefix("start: ")
    assert calls != start, "the first rule is the start"
    try:
        answer = json_rule("answer", closed(schema))
    except RecursionError:
        raise _refused(": the schema of response_format is nested too deeply") from None
    return ["start: all_calls | answer", f"all_calls: {calls}", *others, answer]


def _chosen(tool_choice: object, schemas: Mapping[str, Any]) -> str | None:
    """Returns the tool that must be called; None for any."""
    if tool_choice == "required":
        return None
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(
            f"tool_choice must be 'required' or name a function for a call to be forced, got {str(tool_choice)[:80]!r}",
            param="tool_choice",
        )
    if name not in schemas:
        raise RequestError(
            f"tool_choice names {name!r}, which is none of the tools{nearest(name, schemas)}", param="tool_choice"
        )
    return name


def _closed(tool: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema with its objects closed. Arguments must be an object, even if it does not say so."""
    if schema.get("type", "object") != "object":
        raise _refused(f": the parameters of {tool!r} must be of type object, got {schema['type']!r}")
    try:
        arguments: Mapping[str, Any] = closed({"type": "object", **schema})
    except RecursionError:
        raise _refused(f": the parameters of {tool!r} are nested too deeply") from None
    return arguments


def _marker(text: str, tokenizer: Tokenizer | None) -> str:
    token_id = None if tokenizer is None else tokenizer.special_id(text)
    return quoted(text) if token_id is None else f"<[{token_id}]>"


def _refused(message: str) -> RequestError:
    return RequestError(f"tools{'' if message[0] in '[:' else ' '}{message}", param="tools")
